"""The straight line between two models' weights (Wortsman et al. 2022, arXiv 2109.01903).

Fine-tuning on one task costs accuracy on others. A model whose weights lie on the straight line
between the two ends often keeps nearly all of both: equation 1, theta = (1 - a) start + a end.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.model.clip import CLIP

SHOWN = 8  # parameters that an error message lists. chosen: a screen
Score = Callable[[CLIP], tuple[float, int]]
"""What a model is worth on a task, a share of 1, larger is better; and on how many pictures."""


@dataclass(frozen=True)
class Point:
    """One model on the line, and its two scores."""

    alpha: float
    """0: the start, 1: the end."""
    task: float
    reference: float
    one_picture: float = 0.0
    """What one picture, of the task with the fewer, moves the mean by at most."""

    @property
    def mean(self) -> float:
        return (self.task + self.reference) / 2


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
    alphas: Sequence[float],
) -> Iterator[Point]:
    """Score models along the line on the new task and on one that should not be forgotten.

    Args:
        start: the model before fine-tuning.
        end: the model after it.
        score_task: what was fine-tuned for.
        score_reference: what the start could do already.

    Yields:
        A point for each alpha, in the order given.

    Raises:
        RequestError: the models are not of one architecture.
    """
    model = copy.deepcopy(end).eval()
    for alpha in alphas:
        model.load_state_dict(interpolate(start.state_dict(), end.state_dict(), alpha))
        (task, pictures), (reference, others) = score_task(model), score_reference(model)
        yield Point(alpha, task, reference, one_picture=1 / min(pictures, others) / 2)


RULE = (
    "the smallest alpha whose mean of the two scores is within what one picture moves it by of "
    "the largest mean"
)


def choose_point(points: Sequence[Point]) -> Point:
    """The point that RULE chooses. (Ours; the paper takes 0.5 where nothing can be measured.)"""
    best = max(point.mean for point in points)
    return min((p for p in points if best - p.mean <= p.one_picture), key=lambda p: p.alpha)


def heading() -> str:
    return f"{'alpha':>5}  {'task':>8}  {'reference':>9}  {'mean':>8}"


def row(point: Point) -> str:
    p = point
    return f"{p.alpha:>5.2f}  {p.task:>8.4f}  {p.reference:>9.4f}  {p.mean:>8.4f}"


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
            f"differ in {len(odd)} parameters: {some(odd)}. Take two checkpoints of one run, or "
            "a run and the weights that it started from."
        )


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
