"""torch.compile by one key: tried, kept only if faster, never fatal, invisible in what is saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pennyclip.compilation as compilation
from pennyclip.checkpoint import checkpoints
from pennyclip.cli import main
from pennyclip.compilation import COMPILED, EAGER, Compilation, compiled_blocks
from pennyclip.config import Config, Stage
from pennyclip.config_file import load_recipe
from pennyclip.encoder import load
from pennyclip.model.clip import CLIP
from pennyclip.telemetry.metrics import read_metrics
from pennyclip.train import train
from update_batches import tiny_clip


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
    trial.enter_stage(0)
    modes = []
    values = [9.0] + [1.0] * len(EAGER) + [50.0, 50.0] + [0.9 if faster else 1.1] * len(COMPILED)
    with seconds(monkeypatch, values):
        for step in range(20):
            trial.run(step, lambda: modes.append(compiled(model)))
    assert modes[: EAGER.stop] == [{False}] * EAGER.stop
    assert modes[EAGER.stop : COMPILED.stop] == [{True}] * 5
    assert modes[COMPILED.stop :] == [{faster}] * (20 - COMPILED.stop)
    assert events == [(COMPILED.stop - 1, name)]
    trial.enter_stage(1)  # another stage, another trial
    assert compiled(model) == {False}
    trial.enter_stage(0)  # resumed: as it was decided
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
    monkeypatch.setattr(inductor.cpp, "cxx", ("/nowhere/g++",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    outcome = train(small(small_dataset), tmp_path / "run", quiet=True)
    assert outcome.finished
    events = [r for r in read_metrics(outcome.run / "metrics.jsonl") if r["kind"] == "event"]
    assert [(e["name"], "C++ compiler" in e["message"]) for e in events] == [("not compiled", True)]
    torch._dynamo.reset()
