"""torch.compile by one key: tried, kept only if faster, never fatal, invisible in what is saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import pennyclip.training.update.compilation as compilation
from pennyclip.cli import main
from pennyclip.config.file import load_recipe
from pennyclip.config.keys import Config, Stage
from pennyclip.evaluation.encoder import load
from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import evaluating
from pennyclip.training.loop import train
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.training.update.compilation import COMPILED, EAGER, Compilation, compiled_blocks
from pennyclip.training.update.memory import OutOfMemory
from pennyclip.training.update.not_finite import first_output
from pennyclip.training.update.update import embed_text, update
from pennyclip.weights.checkpoint import checkpoints
from update_batches import adamw, pairs, tiny_clip

PARTS = {"towers", "optimizer"}


@contextmanager
def seconds(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> Iterator[None]:
    """A clock under which update n takes values[n] seconds."""
    ticks = [t for value in values for t in (0.0, value)]
    monkeypatch.setattr(compilation, "_now", lambda: ticks.pop(0))
    yield
    assert not ticks


def compiled(model: CLIP) -> set[bool]:
    return {block._compiled_call_impl is not None for block in compiled_blocks(model)}


@pytest.mark.parametrize(
    ("second", "faster", "end"),
    [
        (0.94, True, "kept"),
        (0.96, False, "left out, not being 5% faster,"),
        (1.1, False, "left out, not being 5% faster,"),
    ],
)
def test_it_is_kept_only_if_clearly_faster(
    second: float, faster: bool, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, events = tiny_clip(), []
    trial = Compilation(True, model, lambda *event, **more: events.append(event))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # has nothing to compile
    trial.enter_stage(0, 0, optimizer)
    modes = []
    values = [9.0] + [1.0] * len(EAGER) + [50.0, 50.0] + [second] * len(COMPILED)
    with seconds(monkeypatch, values):
        for step in range(20):
            trial.run(step, lambda: modes.append(compiled(model)))
    assert modes[: EAGER.stop] == [{False}] * EAGER.stop
    assert modes[EAGER.stop : COMPILED.stop] == [{True}] * 5
    assert modes[COMPILED.stop :] == [{faster}] * (20 - COMPILED.stop)
    ((step, name, message),) = events
    assert (step, name) == (COMPILED.stop - 1, "compiled" if faster else "not compiled")
    assert message.endswith(f" s. It is {end} in this stage.")
    trial.enter_stage(1, 20, optimizer)  # another stage, another trial
    assert compiled(model) == {False}
    trial.enter_stage(0, 20, optimizer)  # resumed: as it was decided
    assert compiled(model) == {faster}


def small(data: Path) -> Config:
    config = load_recipe("scratch-vit-tiny")
    text = replace(config.model.text, width=64, heads=2, layers=2, activation="quick_gelu")
    image = replace(config.model.image, image_size=32, activation="quick_gelu")
    return replace(
        config,
        data=str(data),
        model=replace(config.model, image=image, text=text),
        batch_size=8,
        stages=(Stage(samples=8 * (COMPILED.stop + 3), mask_ratio=0.25),),
        log_every=1,
        compile=True,
    )


def test_a_compiled_quick_gelu_run(
    small_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 9: really compiled; saved under plain names; loads and gives the same; and the same
    losses as a run that is not compiled, apart from rounding."""
    run, plain = tmp_path / "compiled", tmp_path / "plain"
    train(small(small_dataset), run, quiet=True)
    train(replace(small(small_dataset), compile=False), plain, quiet=True)
    events = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "event"]
    assert [e["name"] in ("compiled", "not compiled") for e in events] == [True]
    losses = [
        [r["loss"] for r in read_metrics(path / "metrics.jsonl") if r["kind"] == "train"]
        for path in (run, plain)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][EAGER.stop : COMPILED.stop] != losses[1][EAGER.stop : COMPILED.stop]

    found = checkpoints(run)[-1]
    state = load_file(found.path / "model.safetensors")
    assert not any("_orig_mod" in name or "module." in name for name in state)
    encoder = load(run, "last")
    images = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    eager = encoder.encode_image(images), encoder.encode_text(["a dog", "two cats"])
    for block in compiled_blocks(encoder.model):
        block.compile(dynamic=True)
    again = encoder.encode_image(images), encoder.encode_text(["a dog", "two cats"])
    for one, other in zip(eager, again, strict=True):
        assert torch.allclose(one, other, atol=1e-6)

    argv = ["train", str(run / "config.toml"), "--out", str(tmp_path / "next"), "--init", str(run)]
    assert main([*argv, "--model.image.activation", "gelu"]) == 2
    assert "model.image.activation (there 'quick_gelu', asked 'gelu')" in capsys.readouterr().err


def test_what_cannot_be_compiled_runs_as_it_is(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a working C++ compiler."""
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    config = small(small_dataset)
    config = replace(config, optim=replace(config.optim, name="lamb"))
    with inductor.patch({"cpp.cxx": ("/nowhere/g++",)}):
        outcome = train(config, tmp_path / "run", quiet=True)
    assert outcome.finished
    events = [r for r in read_metrics(outcome.run / "metrics.jsonl") if r["kind"] == "event"]
    assert {e["part"] for e in events} == PARTS
    for event in events:
        assert event["name"] == "not compiled"
        assert "C++ compiler" in event["message"]
    torch._dynamo.reset()


class Faulty(nn.Module):
    """A block's MLP with a fault that can be switched on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.fault, self.fits = inner, "", 3

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "bug":
            raise ValueError("a bug")
        if self.fault == "shapes":
            x = x @ torch.ones(3, 3)
        if self.fault == "memory" and len(x) > self.fits:
            x = x + torch.empty(2**50).sum()
        return self.inner(x)


class Trial:
    """Updates of a text tower, a block of which has a fault, and what is said of them."""

    def __init__(self, *, kept: bool, block: int = -1) -> None:
        """`kept`: decided before, and has made compiled updates."""
        self.model, self.events, self.made = tiny_clip(), [], 0
        faulty = compiled_blocks(self.model)[block]
        self.faulty = faulty.mlp = Faulty(faulty.mlp)
        self.of = Compilation(True, self.model, lambda *event, **_: self.events.append(event))
        self.of.kept = {0: {"towers": True}} if kept else {}
        self.optimizer = adamw(self.model)
        self.of.enter_stage(0, 0, self.optimizer)
        for step in range(EAGER.stop + 1 if kept else EAGER.stop):
            self.of.run(step, self.update)

    def update(self) -> str:
        self.made += 1
        embed_text(self.model, pairs(6)).sum().backward()
        self.optimizer.step()
        return "made"

    def late(self, fault: str = "") -> str:
        self.faulty.fault, self.made = fault, 0
        return self.of.run(5000, self.update)


@pytest.fixture
def traced() -> Iterator[None]:
    """All of torch.compile, but for the C++ compiler at its end, which takes a minute."""
    torch._dynamo.reset()
    with torch.compiler.set_stance(force_backend="aot_eager"):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("fault", "kind", "said", "attempts"),
    [
        ("bug", ValueError, "a bug", 1),
        ("shapes", RuntimeError, "mat1 and mat2 shapes cannot be multiplied", 2),
    ],
)
def test_a_late_error_goes_through_as_it_is(
    fault: str, kind: type[Exception], said: str, attempts: int
) -> None:
    """Wrong shapes are found by the compiler first; the uncompiled update then says it plainly."""
    trial = Trial(kept=True)
    assert compiled(trial.model) == {True}
    with pytest.raises(kind, match=said) as caught:
        trial.late(fault)
    assert caught.type is kind
    assert caught.value.__context__ is None
    assert (trial.made, trial.events) == (attempts, [])
    assert trial.of.kept == {0: {"towers": True}}


@pytest.mark.usefixtures("traced")
def test_in_the_trial_an_uncompiled_update_says_whose_fault_it_was() -> None:
    trial = Trial(kept=False)
    with pytest.raises(ValueError, match="a bug"):
        trial.late("bug")
    assert (trial.made, trial.events, trial.of.kept) == (2, [], {0: {}})

    trial = Trial(kept=False)
    with wrong_kernel():
        assert trial.late() == "made"
    assert trial.events == [
        (
            5000,
            "not compiled",
            "towers: an update with them compiled failed (RuntimeError: a wrong kernel), and as "
            "they are they work. The stage goes on without.",
        )
    ]
    assert (trial.made, trial.of.kept) == (2, {0: {"towers": False}})
    assert compiled(trial.model) == {False}


@pytest.mark.usefixtures("traced")
def test_a_kernel_that_fails_late_goes_through() -> None:
    trial = Trial(kept=True)
    with wrong_kernel(), pytest.raises(RuntimeError, match="a wrong kernel"):
        trial.late()
    assert (trial.made, trial.events, trial.of.kept) == (1, [], {0: {"towers": True}})


@contextmanager
def wrong_kernel() -> Iterator[None]:
    """A compiler that is content, and code of its that fails."""

    def kernel(*inputs: Any) -> Any:
        raise RuntimeError("a wrong kernel")

    with torch.compiler.set_stance(force_backend=lambda graph, inputs: kernel):
        yield


@contextmanager
def no_cpp_compiler() -> Iterator[None]:
    import torch._inductor.config as inductor

    with (
        torch.compiler.set_stance("default"),
        inductor.patch({"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True}),
    ):
        yield


@contextmanager
def broken_backend() -> Iterator[None]:
    def broken(graph: Any, inputs: Any) -> Any:
        return 1 / 0

    with torch.compiler.set_stance(force_backend=broken):
        yield


@contextmanager
def recompile_limit() -> Iterator[None]:
    limits = {"recompile_limit": 1, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits), torch.autocast("cpu"):  # compiles anew
        yield


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("failing", "said"),
    [
        (no_cpp_compiler, "InductorError: InvalidCxxCompiler: No working C++ compiler found"),
        (broken_backend, "BackendCompilerFailed: backend='broken' raised: ZeroDivisionError"),
        (recompile_limit, "FailOnRecompileLimitHit: Hard failure"),
    ],
)
def test_a_compiler_that_fails_late_is_left_out(failing: Any, said: str) -> None:
    trial = Trial(kept=True)
    with failing():
        assert trial.late() == "made"
    ((step, name, message),) = trial.events
    assert (step, name, trial.made) == (5000, "not compiled", 2)
    assert message.startswith(f"towers: compiling them failed ({said}")
    assert trial.of.kept == {0: {"towers": False}}
    assert compiled(trial.model) == {False}
    assert trial.late() == "made"
    assert (trial.made, len(trial.events)) == (1, 1)


@pytest.mark.usefixtures("traced")
def test_memory_that_runs_out_is_not_the_compilers() -> None:
    """The update halves its micro-batch, compiled as it is; where none fits, it says so."""
    trial = Trial(kept=True, block=0)  # of the image tower: its input has a row for each pair
    trial.faulty.fault = "memory"

    def attempt(micro_batch: int) -> dict[str, Any]:
        return update(
            trial.model,
            LOSSES["infonce"],
            trial.optimizer,
            pairs(8),
            clip_norm=1.0,
            precision="fp32",
            micro_batch=micro_batch,
        )

    assert trial.of.run(5000, lambda: attempt(8))["micro_batch"] == 2
    assert (trial.events, compiled(trial.model)) == ([], {True})
    trial.faulty.fits = 0
    with pytest.raises(OutOfMemory, match="not even one pair fits"):
        trial.of.run(5001, lambda: attempt(8))
    assert (trial.events, trial.of.kept) == ([], {0: {"towers": True}})


@pytest.mark.parametrize("moment", ["in the step", "after the step"])
def test_a_step_is_not_made_twice(moment: str) -> None:
    """Also in the trial: it may have moved some weights, or all."""
    model, events, made = tiny_clip(), [], []

    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            made.append(1)
            if moment == "in the step":
                raise ValueError(moment)

    def update() -> None:
        optimizer.step()
        if compiled(model) == {True}:
            raise ValueError(moment)

    trial = Compilation(True, model, lambda *event, **_: events.append(event))
    optimizer = Half(model.parameters(), 0.1)
    trial.enter_stage(0, 0, optimizer)
    for step in range(EAGER.stop):
        trial.run(step, lambda: None)
    with pytest.raises(ValueError, match=moment):
        trial.run(EAGER.stop, update)
    assert (len(made), events, trial.kept) == (1, [], {0: {}})


@pytest.mark.usefixtures("traced")
def test_evaluation_and_hooks_find_it_uncompiled() -> None:
    """Compiled code passes over hooks: the first bad layer would be a block too large."""
    trial = Trial(kept=True)
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["total"]
    assert before > 0
    with evaluating(trial.model), torch.no_grad():
        embed_text(trial.model, pairs(6))
        trial.faulty.inner.c_proj.weight[0, 0] = torch.inf
        name = first_output(trial.model, lambda: embed_text(trial.model, pairs(6)))
    assert name == "the output of text.transformer.resblocks.1.mlp.inner.c_proj"
    assert frames["total"] == before
