"""torch.compile by one key: tried, kept only if faster, never fatal, invisible in what is saved."""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pennyclip.compilation as compilation
from pennyclip.checkpoint import checkpoints
from pennyclip.cli import main
from pennyclip.compilation import COMPILED, EAGER, Compilation, compiled_blocks
from pennyclip.config import Augment, Config, Stage
from pennyclip.config_file import load_recipe
from pennyclip.encoder import load
from pennyclip.model.clip import CLIP
from pennyclip.optim import lamb
from pennyclip.optim.lamb_passes import compiled_first_pass
from pennyclip.telemetry.metrics import read_metrics
from pennyclip.train import resume, train
from update_batches import tiny_clip

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


@pytest.mark.parametrize(("faster", "name"), [(True, "compiled"), (False, "not compiled")])
def test_it_is_kept_only_if_faster(
    faster: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, events = tiny_clip(), []
    trial = Compilation(
        True, model, lambda step, name, message, **more: events.append((step, name))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # has nothing to compile
    trial.enter_stage(0, 0, optimizer)
    modes = []
    values = [9.0] + [1.0] * len(EAGER) + [50.0, 50.0] + [0.9 if faster else 1.1] * len(COMPILED)
    with seconds(monkeypatch, values):
        for step in range(20):
            trial.run(step, lambda: modes.append(compiled(model)))
    assert modes[: EAGER.stop] == [{False}] * EAGER.stop
    assert modes[EAGER.stop : COMPILED.stop] == [{True}] * 5
    assert modes[COMPILED.stop :] == [{faster}] * (20 - COMPILED.stop)
    assert events == [(COMPILED.stop - 1, name)]
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


def test_lambs_step_is_compiled_in_a_run(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Really compiled, and only the step: the towers are frozen. Said in the run's events; as
    uncompiled, up to rounding; and a run that is broken off goes on compiled, bit for bit."""
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return compiled_first_pass(*args)

    monkeypatch.setattr(lamb, "compiled_first_pass", counted)
    ticks = itertools.count(1)
    monkeypatch.setattr(compilation, "_now", lambda: next(ticks) ** 0.5)  # ever faster
    steps = COMPILED.stop + 3
    frozen = Stage(samples=8 * steps, image_layers="none", text_layers="none")
    config = small(small_dataset)
    config = replace(
        config,
        stages=(frozen,),
        augment=Augment(),
        optim=replace(config.optim, name="eva-lamb", lr=1e-2),
        checkpoint=replace(config.checkpoint, every_steps=COMPILED.stop + 1, keep=9),
        evaluate=replace(config.evaluate, every_epochs=99.0),
    )
    runs = {name: tmp_path / name for name in ("straight", "broken", "plain")}
    train(config, runs["straight"], quiet=True)
    events = [r for r in read_metrics(runs["straight"] / "metrics.jsonl") if r["kind"] == "event"]
    assert [e["message"] for e in events if e["name"] != "compiled"] == []
    assert {e["part"]: e["name"] for e in events} == dict.fromkeys(PARTS, "compiled")
    assert len(calls) == steps - EAGER.stop  # the image head has more than COMPILED_MIN weights
    assert "optimizer: the optimizer's step takes" in events[1]["message"]
    assert events[1]["compiled_seconds"] < events[1]["eager_seconds"]

    shutil.copytree(runs["straight"], runs["broken"])
    shutil.rmtree(checkpoints(runs["broken"])[-1].path)
    calls.clear()
    resume(runs["broken"], quiet=True)
    assert len(calls) == 2
    train(replace(config, compile=False), runs["plain"], quiet=True)
    assert len(calls) == 2
    ends = {n: load_file(checkpoints(r)[-1].path / "model.safetensors") for n, r in runs.items()}
    start = load_file(checkpoints(runs["plain"])[0].path / "model.safetensors")
    for key, value in ends["straight"].items():
        assert torch.equal(value, ends["broken"][key])
        assert torch.allclose(value, ends["plain"][key], rtol=1e-5, atol=1e-6)
    head = "visual.head.proj.weight"
    assert not torch.allclose(ends["plain"][head], start[head], rtol=1e-3)


def test_a_step_that_fails_is_not_made_twice() -> None:
    """It may have moved some weights; an update that fails before it is made again uncompiled."""
    model, events, made = tiny_clip(), [], []

    class Half(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            made.append(1)
            raise ValueError("half a step")

    trial = Compilation(True, model, lambda step, name, message, **_: events.append(message))
    optimizer = Half(model.parameters(), 0.1)
    trial.kept = {0: {"towers": True}}
    trial.enter_stage(0, 0, optimizer)
    with pytest.raises(ValueError, match="half a step"):
        trial.run(0, optimizer.step)
    assert (len(made), events) == (1, [])

    def update() -> str:
        if compiled(model) == {True}:
            raise ValueError("a graph break")
        return "made"

    assert trial.run(1, update) == "made"
    assert events == [
        "compiling the towers failed (ValueError: a graph break). The stage goes on without."
    ]
    assert trial.kept == {0: {"towers": False}}
