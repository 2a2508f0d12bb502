"""Atomic save and exact resume.

    checkpoints/step_000500/
        model.safetensors        all weights, under open_clip's names
        ema.safetensors          their moving average, where the run keeps one
        open_clip_config.json    open_clip loads the folder by `local-dir:`
        trunk/config.json        of an image tower that is not timm's default: for open_clip too
        meta.json                step, score, model configuration
        trainer.pt               optimizer state, updates skipped, loss scale, LoRA's adapters
        config.json, tokenizer*.json    of a transformers text tower

A folder appears under its name only when it is whole, so the newest one is always good. Random
state needs no saving: every draw of an update is a function of (seed, step).
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pennyclip.base.atomic import remove, replacing
from pennyclip.base.errors import RequestError
from pennyclip.config.file import from_tree, to_tree
from pennyclip.config.keys import Model, TransformersText
from pennyclip.model.clip import CLIP
from pennyclip.model.ema import Ema
from pennyclip.model.lora import merged_state
from pennyclip.weights.open_clip import open_clip_files

TEXT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class Scores(NamedTuple):
    """What an evaluation found, larger is better; None: not evaluated."""

    raw: float | None = None
    """Of the weights."""
    average: float | None = None
    """Of their moving average."""


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint folder."""

    path: Path
    step: int
    """Batches trained on, those included from which no update was made."""
    score: float | None
    """What the run chooses by, larger is better; None: not evaluated at this step."""
    ema_score: float | None = None
    """The same of the averaged weights, where the run keeps them."""
    averaged: bool = False
    """Whether the averaged weights are meant."""

    @property
    def weights(self) -> Path:
        return self.path / ("ema.safetensors" if self.averaged else "model.safetensors")

    @property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.path / "meta.json").read_text(encoding="utf-8"))


def checkpoints(run: Path) -> list[Checkpoint]:
    """The run's finished checkpoints, the oldest first."""
    found = []
    for file in (run / "checkpoints").glob("step_*/meta.json"):
        found.append(_read(file.parent))
    return sorted(found, key=lambda c: c.step)


def _read(path: Path) -> Checkpoint:
    meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    return Checkpoint(path, meta["step"], meta["score"], meta.get("ema_score"))


def best(found: list[Checkpoint], *, averaged: bool = False) -> Checkpoint | None:
    """The checkpoint with the highest score, the earliest among equals; None: none was scored.

    Args:
        found: in any order.
        averaged: go by the averaged weights' score.
    """

    def score(checkpoint: Checkpoint) -> float | None:
        return checkpoint.ema_score if averaged else checkpoint.score

    scored = [c for c in found if score(c) is not None]
    return max(scored, key=lambda c: (score(c), -c.step), default=None)


def choose(path: Path, which: str = "best") -> Checkpoint:
    """A checkpoint of a run, or the checkpoint that `path` itself is.

    Args:
        path: a run folder or a checkpoint folder.
        which: `best`, `last` or a step; for averaged weights `ema` (the best ones), `ema:last` or
            `ema:STEP`.

    Raises:
        RequestError: there is none, or none of that step; those that exist are named.
    """
    if which == "ema" or which.startswith("ema:"):
        return _choose_average(path, which.removeprefix("ema").removeprefix(":") or "best")
    if (path / "meta.json").is_file():
        return _read(path)
    found = checkpoints(path)
    if not found:
        raise RequestError(
            f"{path.absolute()} holds no checkpoint: expected a run folder with checkpoints/, or a "
            "checkpoint folder with meta.json."
        )
    if which == "best":
        return best(found) or found[-1]
    if which == "last":
        return found[-1]
    for checkpoint in found:
        if str(checkpoint.step) == which:
            return checkpoint
    raise RequestError(
        f"{path} has no checkpoint '{which}'. Choose best, last or one of the steps "
        f"{', '.join(str(c.step) for c in found)}."
    )


def _choose_average(path: Path, which: str) -> Checkpoint:
    chosen = choose(path, which)
    if which == "best":
        chosen = best(checkpoints(path), averaged=True) or chosen
    chosen = replace(chosen, averaged=True)
    if not chosen.weights.is_file():
        raise RequestError(
            f"{chosen.path} has no averaged weights (ema.safetensors): the run did not keep them. "
            "Leave out 'ema', or train with --ema-decay 0.999."
        )
    return chosen


def save(
    run: Path,
    step: int,
    scores: Scores,
    model: CLIP,
    ema: Ema | None,
    trainer: Mapping[str, Any],
    text_folder: Path | None,
    dataset: str,
    keep: int,
    before: Sequence[int] = (),
) -> Path:
    """Write a checkpoint, then remove the old ones.

    The newest `keep` stay, the best one, and the newest before each of some batches.

    Args:
        run: the run's folder.
        step: batches trained on.
        scores: of the evaluation at this step, if there was one.
        model: its weights are written in their own dtypes, adapters merged into them.
        trainer: what training needs to go on, for `torch.load` with `weights_only`.
        text_folder: of a transformers text tower's configuration and tokenizer.
        dataset: fingerprint of what is trained on.
        keep: newest checkpoints kept, at least 1.
        before: batches, counted from 1, that may be replayed.

    Raises:
        OSError: it could not be written (a full disk, say). Earlier checkpoints are untouched.
    """
    final = run / "checkpoints" / f"step_{step:06d}"
    with replacing(final) as folder:
        folder.mkdir()
        meta = {"step": step, "score": scores.raw, "ema_score": scores.average, "dataset": dataset}
        try:
            write_model(folder, model, text_folder, meta)
            if ema is not None:
                with ema.applied(model):
                    save_file(_state(model), folder / "ema.safetensors", {"format": "pt"})
            torch.save(dict(trainer), folder / "trainer.pt")
        except (SafetensorError, RuntimeError) as error:  # what they make of a full disk
            raise OSError(str(error)) from error
    found = checkpoints(run)
    older = [[c for c in found if c.step < batch] for batch in before]
    stay = [*found[-keep:], best(found), best(found, averaged=True), *(c[-1] for c in older if c)]
    kept = {c.step for c in stay if c}
    for old in found:
        if old.step not in kept:
            remove(old.path)
    return final


def write_model(
    folder: Path, model: CLIP, text_folder: Path | None, meta: Mapping[str, Any]
) -> None:
    """Write what `load_model` reads into a folder.

    Args:
        folder: an empty one.
        model: its weights are written in their own dtypes, adapters merged into them.
        text_folder: of a transformers text tower's configuration and tokenizer.
        meta: what meta.json says beside the model's configuration; `step`, `score` and `dataset`.
    """
    save_file(_state(model), folder / "model.safetensors", metadata={"format": "pt"})
    if text_folder is not None:
        for name in TEXT_FILES:
            if (text_folder / name).is_file():
                shutil.copyfile(text_folder / name, folder / name)
    for name, tree in open_clip_files(model, text_folder).items():
        write_json(folder / name, tree)
    write_json(folder / "meta.json", {**meta, "model": to_tree(model.config)})


def _state(model: CLIP) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in merged_state(model).items()}


def load_model(checkpoint: Checkpoint) -> CLIP:
    """The model of a checkpoint, in evaluation mode."""
    config = from_tree(Model, checkpoint.meta["model"], str(checkpoint.path / "meta.json"))
    folder = checkpoint.path if isinstance(config.text, TransformersText) else None
    model = CLIP(config, folder)
    model.load_state_dict(load_file(checkpoint.weights))
    return model.eval()


def load_trainer(checkpoint: Checkpoint) -> dict[str, Any]:
    return torch.load(checkpoint.path / "trainer.pt", map_location="cpu", weights_only=True)


def write_json(path: Path, tree: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
