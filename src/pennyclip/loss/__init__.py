"""Contrastive losses, one paper a file.

A loss is `loss(features) -> (scalar, metrics)`. Adding one is one file and one entry below.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pennyclip.loss.features import Features
from pennyclip.loss.infonce import INITIAL_SCALE, MAX_SCALE, infonce
from pennyclip.loss.multi_positive import multi_positive
from pennyclip.loss.sigmoid import INITIAL_BIAS, sigmoid
from pennyclip.loss.sigmoid import INITIAL_SCALE as SIGMOID_INITIAL_SCALE
from pennyclip.loss.sigmoid import MAX_SCALE as SIGMOID_MAX_SCALE


@dataclass(frozen=True)
class Loss:
    """A loss, and where the temperature and the bias start and end under it."""

    compute: Callable[[Features], tuple[Tensor, dict[str, float | Tensor]]]
    initial_scale: float
    """Factor between cosines and logits with which a model trained from nothing starts."""
    max_scale: float
    """Largest such factor; the log scale is clamped to its logarithm. Infinite: no bound."""
    initial_bias: float | None = None
    """What is added to the logits at first; None: this loss has no bias, nor has its model."""


LOSSES = {
    "infonce": Loss(infonce, INITIAL_SCALE, MAX_SCALE),
    "multi_positive": Loss(multi_positive, INITIAL_SCALE, MAX_SCALE),
    "sigmoid": Loss(sigmoid, SIGMOID_INITIAL_SCALE, SIGMOID_MAX_SCALE, INITIAL_BIAS),
}
"""By the name that a recipe uses."""

__all__ = ["LOSSES", "Features", "Loss"]
