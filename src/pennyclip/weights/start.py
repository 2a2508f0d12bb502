"""What a run starts from: the towers' own weights, another run's, or its own last checkpoint."""

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pennyclip.base.errors import RequestError
from pennyclip.config.file import to_tree
from pennyclip.config.keys import Config
from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.model.lora import adapt, load_adapters
from pennyclip.weights.build import build
from pennyclip.weights.checkpoint import Checkpoint, choose, load_model, load_trainer
from pennyclip.weights.table import summary


@dataclass(frozen=True)
class Start:
    """What a run begins or goes on with."""

    model: CLIP
    trainer: dict[str, Any]
    step: int
    """Batches trained on before."""
    record: dict[str, Any]
    """What metrics.jsonl says about this start."""
    notes: list[str]
    """What people are told about it."""


def start(config: Config, last: Checkpoint | None) -> Start:
    """Build the model and load what it starts from.

    Args:
        config: of the run.
        last: the run's own checkpoint to go on from; None: the run begins.

    Raises:
        RequestError: weights are missing, don't fit or are not finite.
    """
    notes: list[str] = []
    loss = LOSSES[config.loss]
    trainer: dict[str, Any] = {"optimizer": {}, "skipped": 0, "scaler": None}
    step = 0
    weights: dict[str, Any] = {}
    if last is not None:
        model, trainer, step = load_model(last), load_trainer(last), last.step
    elif config.init:
        model, notes = from_checkpoint(config)
        weights = {"init": notes[0]}
    else:
        model, matches = build(
            config.model, config.seed, loss.initial_scale, loss.initial_bias or 0.0
        )
        notes = [summary(match) for match in matches]
        weights = {"weights": [match.summary() for match in matches]}
    _check_finite(model, str(last.path) if last else config.init or "the towers' weights")
    notes += adapt(model, config.lora, config.seed)
    if adapters := trainer.get("adapters"):
        load_adapters(model, adapters)
    record = {
        "request": to_tree(config),
        "logits": {"initial_scale": loss.initial_scale, "max_scale": loss.max_scale},
        "machine": {
            "host": platform.node(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "versions": {name: version(name) for name in ("pennyclip", "torch", "timm")},
        "parameters": {
            "image": sum(p.numel() for p in model.visual.parameters()),
            "text": sum(p.numel() for p in model.text.parameters()),
        },
        **weights,
    }
    return Start(model, trainer, step, record, notes)


def from_checkpoint(config: Config) -> tuple[CLIP, list[str]]:
    """The model of another run's best checkpoint; its optimizer's state stays behind.

    The model is the checkpoint's. What a recipe says of it beside that must agree, apart from what
    a new run may choose: the image size, the dropout before the heads, and the weights that the
    towers once started from.
    """
    found = choose(Path(config.init))
    model = load_model(found)
    there, asked = to_tree(model.config), to_tree(config.model)
    for tree in (there, asked):
        tree.pop("head_dropout", None)
        for tower in ("image", "text"):
            for key in ("image_size", "weights", "pretrained", "drop_keys", "new_keys"):
                tree[tower].pop(key, None)
    if model.config.logit_bias != config.model.logit_bias:
        raise RequestError(
            f"init = {config.init}: that model was trained with another kind of loss than "
            f"'{config.loss}' (only the sigmoid loss has a bias of its logits). Set the loss that "
            "it was trained with."
        )
    different = [
        f"model.{where}{key} (there {of_there.get(key)!r}, asked {value!r})"
        for where, of_there, of_asked in (
            ("", there, asked),
            ("image.", there["image"], asked["image"]),
            ("text.", there["text"], asked["text"]),
        )
        for key, value in of_asked.items()
        if not isinstance(value, dict) and of_there.get(key) != value
    ]
    if different:
        raise RequestError(
            f"init = {config.init}: that model is another than the recipe's: "
            f"{', '.join(different)}. Take the recipe that it was trained with, or change these "
            "keys to what the checkpoint has."
        )
    model.set_head_dropout(config.model.head_dropout)
    notes = [f"starts from step {found.step} of {found.path.absolute().parents[1]}"]
    if found.score is None:
        notes.append(
            "warning: this checkpoint was never evaluated, so nothing says that it is a good start"
        )
    return model, notes


def _check_finite(model: CLIP, source: str) -> None:
    """Refuse weights from which every loss would be NaN."""
    bad = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if bad:
        raise RequestError(
            f"{len(bad)} tensors of {source} hold values that are not finite (the first: "
            f"{bad[0]}). Nothing can be learnt from them: take another checkpoint or file."
        )
