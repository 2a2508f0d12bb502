"""Optimizers, parameter groups, schedules."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from timm.optim import Lion

from pennyclip.config.keys import Optim
from pennyclip.optim.lamb import Lamb, Variant
from pennyclip.optim.stable_adamw import StableAdamW

Make = Callable[[list[dict[str, Any]], Optim], torch.optim.Optimizer]


def _adamw(groups: list[dict[str, Any]], config: Optim) -> torch.optim.Optimizer:
    """Loshchilov and Hutter 2019, in torch's fused form."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _stable_adamw(groups: list[dict[str, Any]], config: Optim) -> torch.optim.Optimizer:
    """AdamW with its rate divided by max(1, RMS) in each tensor (Wortsman et al. 2023)."""
    return StableAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def _lion(groups: list[dict[str, Any]], config: Optim) -> torch.optim.Optimizer:
    """Steps of one size, by the sign of a moving average (Chen et al. 2023); takes no eps."""
    return Lion(groups, lr=config.lr, betas=config.betas)


def _lamb(variant: Variant, about: str) -> Make:
    def make(groups: list[dict[str, Any]], config: Optim) -> torch.optim.Optimizer:
        return Lamb(groups, lr=config.lr, betas=config.betas, eps=config.eps, variant=variant)

    make.__doc__ = about
    return make


OPTIMIZERS: dict[str, Make] = {
    "adamw": _adamw,
    "stable-adamw": _stable_adamw,
    "lion": _lion,
    "lamb": _lamb("paper", "LAMB for batches of many thousands, as its paper (You et al. 2020)."),
    "nvlamb": _lamb(
        "nvlamb", "NVIDIA's LAMB: clips at norm 1 itself, and adapts only what weight decay is on."
    ),
    "eva-lamb": _lamb("eva", "DeepSpeed's LAMB, EVA-CLIP's (Sun et al. 2023): ratios 0.01 to 10."),
}
"""By the name that a recipe uses."""


def step_metrics(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float]]:
    """What an optimizer tells of its last step, for metrics.jsonl. Waits for the device.

    LAMB: `trust_ratio`, each group's median over its tensors. Others: nothing.
    """
    if not isinstance(optimizer, Lamb):
        return {}
    group_of = {
        name: str(group.get("name", i))
        for i, group in enumerate(optimizer.param_groups)
        for name in group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
    }
    ratios: dict[str, list[float]] = {}
    for name, ratio in optimizer.trust_ratios().items():
        ratios.setdefault(group_of[name], []).append(ratio)
    return {"trust_ratio": {name: median(found) for name, found in ratios.items()}}
