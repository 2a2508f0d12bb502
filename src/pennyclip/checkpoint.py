"""Atomic save and exact resume.

    checkpoints/step_000500/
        model.safetensors        all weights, under open_clip's names
        open_clip_config.json    open_clip loads the folder by `local-dir:`
        meta.json                step, score, model configuration
        trainer.pt               optimizer state, updates skipped, loss scale
        config.json, tokenizer*.json    of a transformers text tower

A folder appears under its name only when it is whole, so the newest one is always good. Random
state needs no saving: every draw of an update is a function of (seed, step).
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pennyclip.atomic import remove, replacing
from pennyclip.config import Model, TransformersText
from pennyclip.config_file import from_tree, to_tree
from pennyclip.errors import RequestError
from pennyclip.model.clip import CLIP
from pennyclip.weights.open_clip import open_clip_config

TEXT_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint folder."""

    path: Path
    step: int
    """Updates made."""
    score: float | None
    """What the run chooses by, larger is better; None: not evaluated at this step."""

    @property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.path / "meta.json").read_text(encoding="utf-8"))


def checkpoints(run: Path) -> list[Checkpoint]:
    """The run's finished checkpoints, the oldest first."""
    found = []
    for file in (run / "checkpoints").glob("step_*/meta.json"):
        path, meta = file.parent, json.loads(file.read_text(encoding="utf-8"))
        found.append(Checkpoint(path, meta["step"], meta["score"]))
    return sorted(found, key=lambda c: c.step)


def best(found: list[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the highest score, the earliest among equals."""
    scored = [c for c in found if c.score is not None]
    return max(scored, key=lambda c: (c.score, -c.step)) if scored else None


def choose(path: Path, which: str = "best") -> Checkpoint:
    """A checkpoint of a run by `best`, `last` or its step; or the checkpoint that `path` itself is.

    Raises:
        RequestError: there is none, or none of that step; those that exist are named.
    """
    if (path / "meta.json").is_file():
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        return Checkpoint(path, meta["step"], meta["score"])
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


def save(
    run: Path,
    step: int,
    score: float | None,
    model: CLIP,
    trainer: Mapping[str, Any],
    text_folder: Path | None,
    dataset: str,
    keep: int,
) -> Path:
    """Write a checkpoint, then remove the old ones: the newest `keep` and the best one stay.

    Args:
        run: the run's folder.
        step: batches trained on.
        score: of the evaluation at this step, if there was one.
        model: its weights are written in their own dtypes.
        trainer: what training needs to go on, for `torch.load` with `weights_only`.
        text_folder: of a transformers text tower's configuration and tokenizer.
        dataset: fingerprint of what is trained on.
        keep: newest checkpoints kept, at least 1.

    Raises:
        OSError: it could not be written (a full disk, say). Earlier checkpoints are untouched.
    """
    final = run / "checkpoints" / f"step_{step:06d}"
    with replacing(final) as folder:
        folder.mkdir()
        state = {
            name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()
        }
        try:
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
            torch.save(dict(trainer), folder / "trainer.pt")
        except (SafetensorError, RuntimeError) as error:  # what they make of a full disk
            raise OSError(str(error)) from error
        if text_folder is not None:
            for name in TEXT_FILES:
                if (text_folder / name).is_file():
                    shutil.copyfile(text_folder / name, folder / name)
        write_json(folder / "open_clip_config.json", open_clip_config(model))
        meta = {"step": step, "score": score, "dataset": dataset, "model": to_tree(model.config)}
        write_json(folder / "meta.json", meta)
    found = checkpoints(run)
    kept = {c.step for c in found[-keep:]} | {c.step for c in [best(found)] if c is not None}
    for old in found:
        if old.step not in kept:
            remove(old.path)
    return final


def load_model(checkpoint: Checkpoint) -> CLIP:
    """The model of a checkpoint, in evaluation mode."""
    config = from_tree(Model, checkpoint.meta["model"], str(checkpoint.path / "meta.json"))
    folder = checkpoint.path if isinstance(config.text, TransformersText) else None
    model = CLIP(config, folder)
    model.load_state_dict(load_file(checkpoint.path / "model.safetensors"))
    return model.eval()


def load_trainer(checkpoint: Checkpoint) -> dict[str, Any]:
    return torch.load(checkpoint.path / "trainer.pt", map_location="cpu", weights_only=True)


def write_json(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
