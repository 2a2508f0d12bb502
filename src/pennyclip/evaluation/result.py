"""What every evaluator gives back, and what all of them refuse."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from pennyclip.base.errors import RunError

# Scores, computed in float64, that differ by no more than this are tied. chosen: above float64's
# rounding error in a dot product of unit vectors (1e-15), below what float32 features can express.
TIE = 1e-12

COUNTS = ("images", "captions", "classes", "unreadable")
"""Metrics that are numbers of things."""


@dataclass(frozen=True)
class Result:
    """Numbers to compare, and tables to read."""

    metrics: dict[str, float]
    """Name to value; recalls and accuracies are shares, 0 to 1."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Name to rows, each a dictionary that JSON can hold."""
    chance: dict[str, float] = field(default_factory=dict)
    """By metric, what guessing scores, where that says anything."""
    ceiling: dict[str, float] = field(default_factory=dict)
    """By metric, the most that any model can score, where that is less than 1."""
    notes: list[str] = field(default_factory=list)
    """What people should know before they read the numbers."""


class Encode(Protocol):
    """A model in use, such as `pennyclip.load` returns. Embeddings have unit norm."""

    def encode_image(self, images: Sequence[Image.Image]) -> Float[Tensor, "N D"]: ...

    def encode_text(self, texts: Sequence[str]) -> Float[Tensor, "N D"]: ...


def mean_rank(
    better: Float[Tensor, " N"], tied: Float[Tensor, " N"], own: Float[Tensor, " N"] | float = 1.0
) -> Float[Tensor, " N"]:
    """Rank of the first right answer, from 1: its mean over all orders of what is tied.

    Args:
        better: wrong answers with a higher score than the best right one.
        tied: wrong answers with the same score.
        own: right answers with that score, at least 1. In a random order of these, tied / (own +
            1) wrong answers are expected before the first right one.
    """
    return better + 1 + tied / (own + 1)


def require_finite(features: Float[Tensor, "N D"], what: str) -> None:
    """Refuse features that are not numbers: every comparison with NaN is false, so that they
    would rank first.

    Raises:
        RunError: naming how many and the first.
    """
    finite: Bool[Tensor, " N"] = features.isfinite().all(dim=1)
    if not finite.all():
        bad = (~finite).nonzero().flatten()
        raise RunError(
            f"expected finite features, and {len(bad)} of {len(features)} of the {what} are NaN or "
            f"infinite (first: number {int(bad[0])}, counted from 0). The model has diverged or "
            "its weights are damaged: evaluate an earlier checkpoint, or train with a lower rate."
        )
