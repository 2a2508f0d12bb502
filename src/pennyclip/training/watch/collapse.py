"""Whether all embeddings of a tower have become one, and since when."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pennyclip.training.watch.course import LONG, SHORT

FLAT = 0.1
"""Nats by which logits differ in a batch, at most, when its embeddings have collapsed. Chosen: a
ninth of the least that a start from random weights with a fitting warm-up was seen with."""
FLAT_FOR, FLAT_SHARE = 100, 1 / 3
"""Batches that embeddings must have been alike before the run goes back; or this share of a shorter
run, though not fewer than `LONG`. Chosen: a start with next to no warm-up came out of it by itself
after 57, and learned; and a run that goes back needs as much again to learn something."""


@dataclass
class Collapse:
    """What is remembered of how far the logits of a batch differ."""

    spreads: list[float] = field(default_factory=list)
    """By how many nats those of the last `SHORT` batches differed, at most."""
    since: int | None = None
    """The first batch since which they hardly did."""

    def see(self, step: int, record: Mapping[str, Any]) -> None:
        """Take in what `update` returned for batch `step`."""
        self.spreads = [*self.spreads, logit_spread(record)][-SHORT:]
        if len(self.spreads) < SHORT or median(self.spreads) >= FLAT:
            self.since = None
        elif self.since is None:
            self.since = step - SHORT + 1


def longest(steps: int) -> int:
    """Batches that a collapse may last in a run of so many."""
    return min(FLAT_FOR, max(LONG, int(FLAT_SHARE * steps)))


def described(record: Mapping[str, Any]) -> str:
    """Of a batch whose logits hardly differ: what makes them so."""
    if record["logit_scale"] < 0:  # no model learns at a temperature above 1
        temperature = math.exp(min(-record["logit_scale"], 50.0))
        return f"the temperature is {temperature:.3g}, so nothing can be told apart"
    return (
        f"the mean cosine of different images is {record['image_cosine']:.3f}, of different texts "
        f"{record['text_cosine']:.3f}, so nothing can be told apart"
    )


def logit_spread(record: Mapping[str, Any]) -> float:
    """Nats by which logits differ in a batch, at most: near 0, all embeddings have become one.

    Beside what depends on the row or the column alone, logits have at most this standard
    deviation (Cauchy-Schwarz; 1 - mean cosine is the variance of unit vectors).
    """
    image, text = (max(0.0, 1 - record[f"{tower}_cosine"]) for tower in ("image", "text"))
    return math.exp(record["logit_scale"]) * math.sqrt(image * text)
