"""Optimizers, parameter groups, schedules."""

from collections.abc import Callable
from typing import Any

import torch

from pennyclip.config import Optim


def _adamw(groups: list[dict[str, Any]], config: Optim) -> torch.optim.Optimizer:
    """Loshchilov and Hutter 2019, in torch's fused form."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], Optim], torch.optim.Optimizer]] = {
    "adamw": _adamw
}
"""By the name that a recipe uses."""
