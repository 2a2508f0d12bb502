"""The average of the weights: its values, its swaps, and what a run saves of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pennyclip
from pennyclip.base.errors import RequestError
from pennyclip.config.file import load_recipe
from pennyclip.config.keys import Stage
from pennyclip.model.ema import Ema
from pennyclip.training.loop import train
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.weights.checkpoint import checkpoints, choose, load_trainer
from update_batches import tiny_clip


def test_it_is_the_recurrence_in_float64() -> None:
    model, ema = tiny_clip(), Ema(0.5)
    name, weight = "visual.head.proj.weight", model.visual.head.proj.weight
    generator = torch.Generator().manual_seed(0)
    expected = None
    for step in range(20):
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator))
        ema.update(model)
        decay = min(0.5, (1 + step) / (10 + step))
        value = weight.detach().double()
        expected = value if expected is None else decay * expected + (1 - decay) * value
        assert torch.allclose(ema.average[name].double(), expected, atol=1e-6)


def test_applied_swaps_and_restores() -> None:
    model, ema = tiny_clip(), Ema(0.9)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    ema.update(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    moved = {n: v.clone() for n, v in model.state_dict().items()}
    with ema.applied(model):
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(torch.equal(v, moved[n]) for n, v in model.state_dict().items())


def test_what_begins_to_learn_later_joins_and_what_is_frozen_stays_out() -> None:
    model, ema = tiny_clip(), Ema(0.9)
    late = model.visual.trunk.patch_embed.proj.weight.requires_grad_(False)
    ema.update(model)
    assert "visual.trunk.patch_embed.proj.weight" not in ema.average
    late.requires_grad_(True)
    ema.update(model)
    assert torch.equal(ema.average["visual.trunk.patch_embed.proj.weight"], late)


@pytest.fixture(scope="module")
def run(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = load_recipe("scratch-vit-tiny")
    text = replace(config.model.text, width=64, heads=2, layers=2)
    image = replace(config.model.image, image_size=32)
    config = replace(
        config,
        data=str(small_dataset),
        model=replace(config.model, image=image, text=text),
        batch_size=8,
        stages=(Stage(samples=160),),
        ema_decay=0.8,
    )
    out = tmp_path_factory.mktemp("runs") / "ema"
    train(config, out, quiet=True)
    return out


def test_a_run_keeps_and_evaluates_it_beside_the_weights(run: Path) -> None:
    last = checkpoints(run)[-1]
    raw = load_file(last.path / "model.safetensors")
    averaged = load_file(last.path / "ema.safetensors")
    assert raw.keys() == averaged.keys()
    assert not torch.equal(raw["visual.head.proj.weight"], averaged["visual.head.proj.weight"])
    kept = load_trainer(last)["ema"]
    assert kept["updates"] == 20
    assert all(torch.equal(v, averaged[n]) for n, v in kept["average"].items())
    scores = {
        r["split"]: r["metrics"]["mean_recall"]
        for r in read_metrics(run / "metrics.jsonl")
        if r["kind"] == "eval" and r["step"] == last.step
    }
    assert scores == {"dev": last.score, "dev, averaged weights": last.ema_score}


def test_it_loads_where_it_is_asked_for(run: Path) -> None:
    last = checkpoints(run)[-1]
    averaged = load_file(last.path / "ema.safetensors")
    model = pennyclip.load(run, "ema:last").model
    assert all(torch.equal(v, averaged[n]) for n, v in model.state_dict().items())
    found = checkpoints(run)
    assert choose(run, "ema").ema_score == max(c.ema_score for c in found if c.ema_score)
    (last.path / "ema.safetensors").rename(last.path / "gone")
    try:
        with pytest.raises(RequestError, match="has no averaged weights"):
            choose(run, "ema:last")
    finally:
        (last.path / "gone").rename(last.path / "ema.safetensors")


def test_what_is_frozen_again_is_used_raw() -> None:
    """Its stored features were made with the weights that it has."""
    model, ema = tiny_clip(), Ema(0.9)
    ema.update(model)
    weight = model.visual.trunk.patch_embed.proj.weight
    with torch.no_grad():
        weight.add_(1.0)
    raw = weight.clone()
    weight.requires_grad_(False)
    with ema.applied(model):
        assert torch.equal(weight, raw)
