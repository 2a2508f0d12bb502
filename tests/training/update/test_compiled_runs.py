"""Compiled runs that are broken off, rolled back, averaged and go on in another size."""

import itertools
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pennyclip.training.update.compilation as compilation
from faulty_runs import BATCH, do_before_each, events, named, names, request, trained
from pennyclip.config.keys import Checkpointing, Config, Stage
from pennyclip.model.clip import CLIP
from pennyclip.optim import lamb, lamb_passes
from pennyclip.optim.lamb_passes import compiled_first_pass
from pennyclip.training.loop import resume, train
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.training.update.compilation import COMPILED, EAGER, compiled_blocks
from pennyclip.weights.checkpoint import checkpoints, load_trainer

PARTS = {"towers", "optimizer"}


@pytest.fixture
def ever_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock under which all that is compiled is kept."""
    ticks = itertools.count(1)
    monkeypatch.setattr(compilation, "_now", lambda: next(ticks) ** 0.5)


@pytest.fixture
def traced() -> Iterator[None]:
    """All of torch.compile, but for the C++ compiler at its end, which takes a minute."""
    forget()
    with torch.compiler.set_stance(force_backend="aot_eager"):
        yield
    forget()


def forget() -> None:
    """What this process has compiled: as in a new one."""
    torch._dynamo.reset()
    lamb_passes._compiled_kernel.cache_clear()


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Before every update: whether the towers are compiled, and LAMB."""
    found: list[tuple[bool, bool]] = []

    def look(_: int, model: CLIP, optimizer: Any) -> None:
        towers = {block._compiled_call_impl is not None for block in compiled_blocks(model)}
        found.append((towers == {True}, getattr(optimizer, "_compiled", False)))

    do_before_each(monkeypatch, look)
    return found


def weights(run: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(checkpoints(run)[-1].path / file)


def broken_off(straight: Path, at: int, copy: Path) -> Path:
    """The run as it was when it had saved update `at`."""
    shutil.copytree(straight, copy)
    for checkpoint in checkpoints(copy):
        if checkpoint.step > at:
            shutil.rmtree(checkpoint.path)
    assert checkpoints(copy)[-1].step == at
    forget()
    return copy


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-4), name


def compiling(dataset: Path, steps: int, **changed: Any) -> Config:
    config = request(dataset, steps)
    optim = replace(config.optim, name="lamb", lr=1e-2)
    saving = Checkpointing(every_steps=5, keep=9)
    return replace(config, **{"compile": True, "optim": optim, "checkpoint": saving} | changed)


@pytest.mark.usefixtures("ever_faster", "traced")
@pytest.mark.parametrize("at", [5, 10], ids=["in the trial", "after the decision"])
def test_a_run_that_is_broken_off(
    at: int, small_dataset: Path, tmp_path: Path, modes: list[tuple[bool, bool]]
) -> None:
    """In the trial it tries again, and ends alike up to rounding; decided, it goes on compiled at
    once, bit for bit, though all is compiled anew and meets other lengths first."""
    straight = tmp_path / "straight"
    train(compiling(small_dataset, 20), straight, quiet=True)
    assert names(straight) == ["compiled", "compiled"]
    assert modes == [(False, False)] * EAGER.stop + [(True, True)] * (20 - EAGER.stop)
    modes.clear()

    broken = broken_off(straight, at, tmp_path / "broken")
    trainer = load_trainer(checkpoints(broken)[-1])
    assert trainer["compiled"] == {0: {} if at == 5 else dict.fromkeys(PARTS, True)}
    resume(broken, quiet=True)
    trial = EAGER.stop if at == 5 else 0
    assert modes == [(False, False)] * trial + [(True, True)] * (20 - at - trial)
    decided = [e for e in events(broken) if not e.get("abandoned")]
    assert {e["part"]: e["name"] for e in decided} == dict.fromkeys(PARTS, "compiled")
    if at == 5:
        assert_near(weights(broken), weights(straight))
    else:
        for name, value in weights(straight).items():
            assert torch.equal(weights(broken)[name], value), name


@pytest.mark.usefixtures("ever_faster", "traced")
def test_a_compiled_run_that_is_rolled_back(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the checkpoint's weights, is compiled as before, and learns as it would have plain."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    seen: list[tuple[bool, bool]] = []

    def flip_and_look(number: int, model: CLIP, _: Any) -> None:
        towers = {block._compiled_call_impl is not None for block in compiled_blocks(model)}
        state = model.state_dict()
        saved = checkpoints(run)[:-1] if number > 50 else []  # the last is the rollback's own
        same = any(
            all(torch.equal(state[name], value) for name, value in load_file(c.weights).items())
            for c in saved
        )
        seen.append((towers == {True}, same))
        if number == 50:
            weight = model.text.transformer.resblocks[0].mlp.c_fc.weight.data
            weight.view(torch.int32)[3, 5] ^= 1 << 30

    do_before_each(monkeypatch, flip_and_look)
    saving = Checkpointing(every_steps=20, keep=9)
    optim = request(small_dataset, 1).optim
    config = compiling(small_dataset, 70, checkpoint=saving, optim=optim)
    train(config, run, quiet=True)
    looked = list(seen)
    do_before_each(monkeypatch, flip_and_look)  # counts from 1 again
    train(replace(config, compile=False), plain, quiet=True)

    back = named(run, "rolled back")
    assert (back["since"], back["to"]) == (50, 40)
    assert back["step"] == named(plain, "rolled back")["step"]
    assert [on for on, _ in looked] == [False] * EAGER.stop + [True] * (70 - EAGER.stop)
    assert [number for number, (_, same) in enumerate(looked) if same] == [back["step"]]
    found, expected = ([r["loss"] for r in trained(path)] for path in (run, plain))
    assert found[: back["since"] - 1] == pytest.approx(expected[: back["since"] - 1], rel=1e-3)
    assert found[back["step"] :] == pytest.approx(expected[back["step"] :], rel=1e-2, abs=1e-3)
    assert found[back["step"]] < 0.5 * math.log(BATCH)


@pytest.mark.usefixtures("ever_faster", "traced")
def test_averaged_weights_and_another_image_size(
    small_dataset: Path, tmp_path: Path, modes: list[tuple[bool, bool]]
) -> None:
    """Each stage decides anew; averages, scores and names are those of a plain run."""
    steps = COMPILED.stop + 3
    config = compiling(
        small_dataset,
        0,
        stages=(
            Stage(samples=BATCH * steps, image_size=32),
            Stage(samples=BATCH * steps, image_size=48, mask_ratio=0.5),
        ),
        ema_decay=0.8,
    )
    config = replace(config, evaluate=replace(config.evaluate, every_epochs=1.0))
    run, plain = tmp_path / "run", tmp_path / "plain"
    train(config, run, quiet=True)
    assert names(run) == ["compiled"] * 4
    assert modes == 2 * ([(False, False)] * EAGER.stop + [(True, True)] * (steps - EAGER.stop))
    train(replace(config, compile=False), plain, quiet=True)
    assert modes[2 * steps :] == [(False, False)] * (2 * steps)
    averages = weights(run, "ema.safetensors")
    for file in ("model.safetensors", "ema.safetensors"):
        assert_near(weights(run, file), weights(plain, file))
    assert max((weights(run)[n] - v).abs().max() for n, v in averages.items()) > 1e-3
    losses = [[r["loss"] for r in trained(path)] for path in (run, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    scores = [
        [
            r["metrics"]["mean_recall"]
            for r in read_metrics(path / "metrics.jsonl")
            if r["kind"] == "eval"
        ]
        for path in (run, plain)
    ]
    assert len(scores[0]) >= 4
    assert scores[0] == pytest.approx(scores[1], abs=0.1)


def test_lambs_step_by_the_c_compiler(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ever_faster: None
) -> None:
    """Really compiled, and only the step: the towers are frozen. Said in the run's events; as
    uncompiled, up to rounding; and a run that is broken off and compiles anew goes on bit for
    bit."""
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return compiled_first_pass(*args)

    monkeypatch.setattr(lamb, "compiled_first_pass", counted)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "first"))
    forget()
    steps = COMPILED.stop + 3
    frozen = Stage(samples=BATCH * steps, image_layers="none", text_layers="none")
    config = compiling(small_dataset, 0, stages=(frozen,))
    config = replace(
        config,
        model=replace(config.model, embed_dim=1024),  # the image head: over COMPILED_MIN weights
        optim=replace(config.optim, name="eva-lamb"),
        checkpoint=Checkpointing(every_steps=COMPILED.stop + 1, keep=9),
    )
    straight, plain = tmp_path / "straight", tmp_path / "plain"
    train(config, straight, quiet=True)
    said = events(straight)
    assert {e["part"]: e["name"] for e in said} == dict.fromkeys(PARTS, "compiled")
    assert len(calls) == steps - EAGER.stop
    assert "optimizer: the optimizer's step takes" in said[1]["message"]
    assert said[1]["compiled_seconds"] < said[1]["eager_seconds"]

    broken = broken_off(straight, COMPILED.stop + 1, tmp_path / "broken")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "second"))
    calls.clear()
    resume(broken, quiet=True)
    assert len(calls) == 2
    assert list((tmp_path / "second").rglob("*.cpp"))
    train(replace(config, compile=False), plain, quiet=True)
    assert len(calls) == 2
    start = load_file(checkpoints(plain)[0].path / "model.safetensors")
    for key, value in weights(straight).items():
        assert torch.equal(value, weights(broken)[key])
        assert torch.allclose(value, weights(plain)[key], rtol=1e-5, atol=1e-6)
    head = "visual.head.proj.weight"
    assert not torch.allclose(weights(plain)[head], start[head], rtol=1e-3)
    forget()
