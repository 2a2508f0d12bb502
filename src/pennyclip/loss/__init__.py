"""Contrastive losses, one paper a file.

A loss is `loss(features) -> (scalar, metrics)`. Adding one is one file and one entry below.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pennyclip.loss.features import Features
from pennyclip.loss.infonce import MAX_SCALE, infonce


@dataclass(frozen=True)
class Loss:
    """A loss and the bound that it sets on the temperature."""

    compute: Callable[[Features], tuple[Tensor, dict[str, float | Tensor]]]
    max_scale: float
    """Largest factor between cosines and logits; the log scale is clamped to its logarithm."""


LOSSES = {"infonce": Loss(infonce, MAX_SCALE)}
"""By the name that a recipe uses."""

__all__ = ["LOSSES", "Features", "Loss"]
