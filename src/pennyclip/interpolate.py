"""WiSE-FT: between the start and the end of a fine-tuning (Wortsman et al. 2022, arXiv 2109.01903).

Fine-tuning on one task costs accuracy on others. A model whose weights lie on the straight line
between the two ends often keeps nearly all of both: equation 1, theta = (1 - a) start + a end.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pennyclip.checkpoint import choose, load_model
from pennyclip.config_file import read_toml
from pennyclip.errors import RequestError
from pennyclip.model.clip import CLIP
from pennyclip.weights.build import build

SHOWN = 8  # parameters that an error message lists. chosen: a screen
ALPHAS = tuple(i / 10 for i in range(11))  # section 4's steps of 0.1, both ends included
Score = Callable[[CLIP], float]
"""What a model is worth on a task, larger is better."""


@dataclass(frozen=True)
class Point:
    """One model on the line, and its two scores."""

    alpha: float
    """0: the start, 1: the end."""
    task: float
    reference: float


def interpolate(
    start: Mapping[str, Tensor], end: Mapping[str, Tensor], alpha: float
) -> dict[str, Tensor]:
    """The weights at `alpha` of the way from `start` to `end`, in the end's dtypes.

    Whole numbers (BatchNorm's counters) cannot lie in between: they are the end's. At 0 and 1 the
    result equals the ends exactly.

    Args:
        start: state dict of the model before fine-tuning.
        end: of the same architecture, after it.
        alpha: in [0, 1].

    Raises:
        RequestError: alpha lies outside, or the two are not of one architecture; the parameters
            that differ are named.
    """
    if not 0 <= alpha <= 1:
        raise RequestError(f"alpha must lie in [0, 1], found {alpha}: 0 is the start, 1 the end")
    _refuse_unlike(start, end)
    return {
        name: torch.lerp(start[name].float(), value.float(), alpha).to(value.dtype)
        if value.is_floating_point()
        else value.clone()
        for name, value in end.items()
    }


def sweep(
    start: CLIP,
    end: CLIP,
    score_task: Score,
    score_reference: Score,
    alphas: Sequence[float] = ALPHAS,
) -> tuple[Point, ...]:
    """Score models along the line on the new task and on one that should not be forgotten.

    Args:
        start: the model before fine-tuning (`start_of`).
        end: the model after it.
        score_task: what was fine-tuned for.
        score_reference: what the start could do already.

    Returns:
        A point for each alpha, in the order given.

    Raises:
        RequestError: the models are not of one architecture.
    """
    model = copy.deepcopy(end).eval()
    points = []
    for alpha in alphas:
        model.load_state_dict(interpolate(start.state_dict(), end.state_dict(), alpha))
        points.append(Point(alpha, score_task(model), score_reference(model)))
    return tuple(points)


def table(points: Sequence[Point]) -> str:
    """The points as plain text, scores in full."""
    lines = [f"{'alpha':>5}  {'task':>8}  {'reference':>9}"]
    lines += [f"{p.alpha:>5.2f}  {p.task:>8.4f}  {p.reference:>9.4f}" for p in points]
    return "\n".join(lines)


def start_of(run: Path) -> CLIP:
    """The model that a run started from, built as the run built it.

    Raises:
        RequestError: it is no run, or a part of its model started from random weights: the line
            from there leads through models that can do nothing.
    """
    if not (run / "config.toml").is_file():
        raise RequestError(f"{run.absolute()} is not a run folder: it has no config.toml")
    config = read_toml(run / "config.toml")
    model, matches = build(config.model, config.seed)
    loaded = {match.tower.split()[0] for match in matches}
    random = [f"the {tower} tower" for tower in ("image", "text") if tower not in loaded]
    random += [name for match in matches for name in match.new]
    if random:
        raise RequestError(
            f"{run} cannot be interpolated with its start: these began from random weights: "
            f"{_some(random)}. WiSE-FT needs a start that is already a CLIP; fine-tune one "
            "(model.image.weights and model.text.weights from the same file)."
        )
    return model.eval()


def end_of(run: Path, checkpoint: str = "best") -> CLIP:
    """The model of a run's checkpoint (`best`, `last` or a step)."""
    return load_model(choose(run, checkpoint))


def _refuse_unlike(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> None:
    only = [f"{name} (start only)" for name in start if name not in end]
    only += [f"{name} (end only)" for name in end if name not in start]
    shapes = [
        f"{name} ({list(start[name].shape)} at the start, {list(value.shape)} at the end)"
        for name, value in end.items()
        if name in start and start[name].shape != value.shape
    ]
    if odd := only + shapes:
        raise RequestError(
            f"two models can be interpolated only where they are of one architecture; these "
            f"differ in {len(odd)} parameters: {_some(odd)}. Take two checkpoints of one run, or "
            "a run and the weights that it started from."
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
