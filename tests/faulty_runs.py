"""Small runs into which faults are put, and what they wrote of it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pennyclip.training.run
from pennyclip.config.file import load_recipe
from pennyclip.config.keys import Augment, Checkpointing, ClipText, Config, Stage
from pennyclip.model.clip import CLIP
from pennyclip.training.telemetry.metrics import read_metrics

BATCH = 16
Do = Callable[[int, CLIP, torch.optim.Optimizer], None]
"""Done before the update from batch `number` (from 1)."""


def request(dataset: Path, steps: int, **changed: Any) -> Config:
    """A text tower that learns beside a frozen image trunk: some milliseconds an update."""
    recipe = load_recipe("scratch-vit-tiny")
    config = replace(
        recipe,
        data=str(dataset),
        model=replace(
            recipe.model,
            embed_dim=32,
            image=replace(recipe.model.image, name="test_vit", image_size=32),
            text=ClipText(width=32, heads=2, layers=1),
        ),
        stages=(Stage(samples=BATCH * steps, image_layers="none"),),
        augment=Augment(),
        batch_size=BATCH,
        log_every=1,
        workers=0,
        optim=replace(recipe.optim, lr=2e-3),
        checkpoint=Checkpointing(every_steps=20, keep=3),
        evaluate=replace(recipe.evaluate, every_epochs=1e3),
    )
    return replace(config, **changed)


def events(run: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "event"]


def names(run: Path) -> list[str]:
    return [event["name"] for event in events(run)]


def named(run: Path, name: str) -> dict[str, Any]:
    return next(event for event in events(run) if event["name"] == name)


def trained(run: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]


def mean_loss(run: Path, last: int = 10) -> float:
    return sum(float(r["loss"]) for r in trained(run)[-last:]) / last


def nan_in_a_layer(at: Callable[[int], bool]) -> Do:
    """A layer's output becomes NaN while a batch is seen."""

    def do(number: int, model: CLIP, _: Any) -> None:
        layer = model.text.transformer.resblocks[0].mlp.c_proj
        layer._forward_hooks.clear()
        if at(number):
            layer.register_forward_hook(lambda *seen: seen[2] * math.nan)

    return do


def do_before_each(monkeypatch: pytest.MonkeyPatch, do: Do) -> None:
    """Have `do` done before every update, counted from 1 in this process."""
    update, seen = SOUND, [0]

    def counted(model: CLIP, loss: Any, optimizer: Any, *rest: Any, **more: Any) -> Any:
        seen[0] += 1
        do(seen[0], model, optimizer)
        return update(model, loss, optimizer, *rest, **more)

    monkeypatch.setattr(pennyclip.training.run, "update", counted)


SOUND = pennyclip.training.run.update
