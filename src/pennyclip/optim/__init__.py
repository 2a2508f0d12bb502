"""Optimizers, parameter groups, schedules."""

from collections.abc import Callable
from typing import Any

import torch

from pennyclip.config import Optim
from pennyclip.optim.lamb import Lamb, Variant

Make = Callable[[list[dict[str, Any]], Optim], torch.optim.Optimizer]


def _adamw(groups: list[dict[str, Any]], config: Optim) -> torch.optim.Optimizer:
    """Loshchilov and Hutter 2019, in torch's fused form."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _lamb(variant: Variant) -> Make:
    def make(groups: list[dict[str, Any]], config: Optim) -> torch.optim.Optimizer:
        return Lamb(groups, lr=config.lr, betas=config.betas, eps=config.eps, variant=variant)

    make.__doc__ = f"LAMB (You et al. 2020) for large batches, variant '{variant}'."
    return make


OPTIMIZERS: dict[str, Make] = {
    "adamw": _adamw,
    "lamb": _lamb("paper"),
    "nvlamb": _lamb("nvlamb"),
    "eva-lamb": _lamb("eva"),
}
"""By the name that a recipe uses."""
