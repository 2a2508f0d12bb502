"""What `pennyclip interpolate` does: score models on the line, choose one, write it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pennyclip.base.atomic import replacing
from pennyclip.base.errors import RequestError
from pennyclip.commands.interpolate.line import (
    RULE,
    Point,
    Score,
    choose_point,
    heading,
    interpolate,
    row,
    some,
    sweep,
)
from pennyclip.config.file import read_toml
from pennyclip.config.keys import Config, Evaluation
from pennyclip.data.index import Dataset
from pennyclip.data.tokens import TokenStore
from pennyclip.evaluation.encoder import CHUNK, Encoder, make_tokenizer
from pennyclip.evaluation.features import embed_rows, fingerprint
from pennyclip.evaluation.retrieval import retrieval
from pennyclip.evaluation.task import Task
from pennyclip.evaluation.zeroshot import read_names, zeroshot
from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.weights.build import build
from pennyclip.weights.checkpoint import Checkpoint, choose, load_model, write_json, write_model
from pennyclip.weights.start import from_checkpoint

RECORD = "interpolation.json"


@dataclass(frozen=True)
class Interpolated:
    """A finished interpolation: `path` is a checkpoint."""

    path: Path
    alpha: float
    why: str
    """By what alpha was chosen."""
    points: tuple[Point, ...]
    """The sweep; empty where nothing was measured."""
    notes: tuple[str, ...]
    """What the scores were measured on, and what that means for them."""

    def __str__(self) -> str:
        lines = [heading()] if self.points else []
        lines += [row(p) + "  written" * (p.alpha == self.alpha) for p in self.points]
        if self.points:
            step, means = self.points[0].one_picture, [p.mean for p in self.points]
            lines.append(f"one picture moves the mean by up to {step:.4f}")
            if max(means) - min(means) <= step:
                lines.append("so none of these models is better than another: take more pictures")
        lines += [*self.notes, f"{self.path}: the model at alpha {self.alpha:g}, {self.why}"]
        return "\n".join(lines)


def interpolate_run(
    run: Path,
    out: Path,
    task: Task,
    reference: Task,
    alphas: Sequence[float],
    *,
    start: Path | None = None,
    checkpoint: str = "best",
    alpha: float | None = None,
) -> Interpolated:
    """Write the model between the start and the end of a run that is best on two tasks.

    Args:
        run: the end: a run's folder, or a checkpoint's.
        out: the checkpoint folder to make. One that holds this very model is left as it is.
        task: what the run was for.
        reference: what it should not forget.
        alphas: where on the line models are scored; 0 is the start, 1 the end.
        start: a run or checkpoint to begin at; None: what `run` started from.
        checkpoint: of the run: `best`, `last` or a step.
        alpha: write this one, whatever the scores; then tasks may be left out.

    Raises:
        RequestError: a number cannot be, a task is missing, the ends are not of one architecture,
            or `out` holds something else.
    """
    measured = _check(task, reference, alphas, alpha)
    chosen = choose(run, checkpoint)
    end = load_model(chosen)
    begin = start_of(run) if start is None else load_model(choose(start))
    begin.visual.set_image_size(end.visual.image_size)
    request = {
        "start": fingerprint(begin.state_dict()),
        "end": fingerprint(end.state_dict()),
        "alphas": sorted(set(alphas)) if measured else [],
        "alpha": alpha,
        "task": _tree(task),
        "reference": _tree(reference),
        "pennyclip": version("pennyclip"),
    }
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return _finished(out, request)

    points: list[Point] = []
    line = sorted(set(alphas))
    if measured:
        on_task, on_reference = (score(one, chosen, end) for one in (task, reference))
        for point in sweep(begin, end, on_task, on_reference, line):
            points.append(point)
            done = f"{len(points)} of {len(line)}"
            print(f"alpha {point.alpha:g} scored, {done}", file=sys.stderr, flush=True)
    found = choose_point(points).alpha if alpha is None else alpha
    end.load_state_dict(interpolate(begin.state_dict(), end.state_dict(), found))
    record = {
        "alpha": found,
        "why": "as asked" if alpha is not None else f"chosen by {RULE}",
        "points": [asdict(p) for p in points],
        "notes": held_out_notes(run, task, reference) if measured else [],
    }
    meta = {"step": chosen.step, "score": None, "dataset": chosen.meta["dataset"]}
    with replacing(out) as folder:
        folder.mkdir()
        write_model(folder, end, chosen.path, meta)
        write_json(folder / RECORD, {"request": request, **record})
    return _finished(out, request)


def start_of(run: Path) -> CLIP:
    """The model that a run started from, built as the run built it.

    Raises:
        RequestError: it is no run, or a part of its model started from random weights: the line
            from there leads through models that can do nothing.
    """
    if not (run / "config.toml").is_file():
        raise RequestError(
            f"{run.absolute()} is not a run folder: it has no config.toml, so its start is not "
            "known. Give a run, or the start's checkpoint as --start."
        )
    config = read_toml(run / "config.toml")
    if config.init:
        return from_checkpoint(config)[0].eval()
    loss = LOSSES[config.loss]
    model, matches = build(config.model, config.seed, loss.initial_scale, loss.initial_bias or 0.0)
    loaded = {match.tower.split()[0] for match in matches}
    random = [f"the {tower} tower" for tower in ("image", "text") if tower not in loaded]
    random += [name for match in matches for name in match.new]
    if random:
        raise RequestError(
            f"{run} cannot be interpolated with its start: these began from random weights: "
            f"{some(random)}. WiSE-FT needs a start that is already a CLIP: train a second run "
            "from a first one's checkpoint (--init FIRST), or give a checkpoint as --start."
        )
    return model.eval()


def score(task: Task, checkpoint: Checkpoint, like: CLIP) -> Score:
    """What models are worth on a task, as shares of 1: mean recall, or top-1; on how many pictures.

    Args:
        checkpoint: holds the models' tokenizer.
        like: a model of their architecture.

    Raises:
        RequestError: there is no such dataset, split or folder.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = make_tokenizer(like.config, checkpoint.path)
    if task.data is not None:
        dataset = Dataset(task.data)
        rows, tokens = dataset.subset(task.split), TokenStore.open(dataset, tokenizer)

        def mean_recall(model: CLIP) -> tuple[float, int]:
            embedded = embed_rows(model.to(device), dataset, tokens, rows, CHUNK)
            found = retrieval(embedded.image, embedded.text, embedded.owner)
            return found.metrics["mean_recall"], len(rows)

        return mean_recall
    assert task.images is not None, "_check has refused a task without either"
    images, names = task.images, read_names(task.classes) if task.classes is not None else None

    def top1(model: CLIP) -> tuple[float, int]:
        encoder = Encoder(model.to(device), tokenizer, checkpoint)
        metrics = zeroshot(encoder, images, names).metrics
        return metrics["top1"], int(metrics["images"])

    return top1


def _check(task: Task, reference: Task, alphas: Sequence[float], alpha: float | None) -> bool:
    """Refuse what is incomplete; says whether anything is to be measured."""
    outside = [a for a in [*alphas, *([] if alpha is None else [alpha])] if not 0 <= a <= 1]
    if outside or not alphas:
        raise RequestError(
            f"expected alphas in [0, 1], found {some([f'{a:g}' for a in outside]) or 'none'}: 0 is "
            "the start, 1 the end"
        )
    given = {name: one for name, one in (("task", task), ("reference", reference)) if one != Task()}
    if not given and alpha is not None:
        return False
    for name in ("task", "reference"):
        one = given.get(name, Task())
        if (one.data is None) == (one.images is None):
            raise RequestError(
                f"expected either --{name}.data (a dataset) or --{name}.images (a folder with one "
                f"folder a class), found {'neither' if one.data is None else 'both'}. The choice "
                "of alpha needs two tasks: one that the run was for, and one that it should not "
                "forget. Without any, --alpha 0.5 writes the middle."
            )
    return True


def held_out_notes(run: Path, task: Task, reference: Task) -> list[str]:
    """What was measured, and what is no longer held out after a choice by it."""
    config: Config | None = None
    if (run / "config.toml").is_file():
        config = read_toml(run / "config.toml")
    notes = [
        f"task: {task}",
        f"reference: {reference}",
        "Scores on what chose alpha are no held-out scores: report on other rows and pictures.",
    ]
    choosing = Evaluation.split if config is None else config.evaluate.split
    for name, one in (("task", task), ("reference", reference)):
        if one.data is None or one.split == choosing:
            continue
        trained = (
            config is not None
            and one.split == config.subset
            and str(one.data.absolute()) == config.data
        )
        why = (
            "the run was trained on it, so its scores favour the end"
            if trained
            else "if reports are made on it, they are no longer on held-out rows"
        )
        notes.append(
            f"warning: alpha is chosen on the split '{one.split}': {why}. Take --{name}.split "
            f"{choosing}."
        )
    return notes


def _tree(task: Task) -> dict[str, Any]:
    """A task as JSON, its paths absolute."""
    values = asdict(task).items()
    return {key: str(v.absolute()) if isinstance(v, Path) else v for key, v in values}


def _finished(out: Path, request: dict[str, Any]) -> Interpolated:
    """The interpolation that lies in a folder.

    Raises:
        RequestError: it is of another request, or none.
    """
    record = {}
    if (out / RECORD).is_file():
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    if record.get("request") != request:
        what = "another interpolation" if record else "something that is no interpolation"
        raise RequestError(f"{out} holds {what}. Choose another --out, or remove the folder.")
    return Interpolated(
        path=out,
        alpha=record["alpha"],
        why=record["why"],
        points=tuple(Point(**p) for p in record["points"]),
        notes=tuple(record["notes"]),
    )
