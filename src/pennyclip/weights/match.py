"""What of a weights file went where: every key and every parameter is accounted for."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pennyclip.errors import RequestError

MIN_LOADED = 0.95  # chosen: below this share of a tower, something else than a head is missing


@dataclass(frozen=True)
class Rule:
    """Keys that match `pattern` wholly become `to`, or are dropped for `reason`."""

    pattern: str
    to: str | None
    reason: str = ""


@dataclass(frozen=True)
class Match:
    """How a file fits a module. Sizes are counted in parameters."""

    tower: str
    file: str
    matched: dict[str, str]
    """Key of the file -> name in the module."""
    dropped: dict[str, str]
    """Key of the file -> why it is not used."""
    left_over: dict[str, str]
    """Key of the file -> why it found no place."""
    new: list[str]
    """Parameters and buffers of the module that the file says nothing about."""
    share: float
    """Of the module's values, how many were loaded."""

    def check(self) -> None:
        """Refuse a file that does not fit.

        Raises:
            RequestError: keys are left over, or less than 95 % of the tower was loaded.
        """
        if not self.left_over and self.share >= MIN_LOADED:
            return
        lines = [f"  {key}: {why}" for key, why in list(self.left_over.items())[:8]]
        lines += [f"  {name}: not in the file" for name in self.new[:8]]
        hidden = len(self.left_over) + len(self.new) - len(lines)
        lines += [f"  and {hidden} more"] if hidden > 0 else []
        raise RequestError(
            f"the weights {self.file} do not fit the {self.tower}: {self.share:.1%} of it would be "
            f"loaded (at least {MIN_LOADED:.0%} is expected) and {len(self.left_over)} keys of the "
            "file found no place. Is it the right file for this tower?\n" + "\n".join(lines)
        )

    def summary(self) -> dict[str, Any]:
        """For the start of the run's metrics and its report."""
        return {
            "tower": self.tower,
            "file": self.file,
            "loaded": len(self.matched),
            "new": len(self.new),
            "dropped": len(self.dropped),
            "share": self.share,
        }


def rename(key: str, layout: tuple[Rule, ...]) -> tuple[str | None, str]:
    """A key's name under a layout, or None and the reason; a key without a rule keeps its name."""
    for rule in layout:
        if found := re.fullmatch(rule.pattern, key):
            return (None, rule.reason) if rule.to is None else (found.expand(rule.to), "")
    return key, ""


@torch.no_grad()
def load_matching(
    module: nn.Module, state: dict[str, Tensor], layout: tuple[Rule, ...], tower: str, file: str
) -> Match:
    """Copy what fits from a file's tensors into a module, keeping the module's dtypes."""
    target = module.state_dict()
    matched: dict[str, str] = {}
    dropped: dict[str, str] = {}
    left_over: dict[str, str] = {}
    for key, value in state.items():
        name, reason = rename(key, layout)
        if name is None:
            dropped[key] = reason
        elif name not in target:
            left_over[key] = f"the tower has no {name}"
        elif target[name].shape != value.shape:
            left_over[key] = (
                f"shape {list(value.shape)}, and the tower's {name} has {list(target[name].shape)}"
            )
        else:
            target[name].copy_(value)
            matched[key] = name
    loaded = set(matched.values())
    total = sum(value.numel() for value in target.values())
    return Match(
        tower=tower,
        file=file,
        matched=matched,
        dropped=dropped,
        left_over=left_over,
        new=[name for name in target if name not in loaded],
        share=sum(target[name].numel() for name in loaded) / total,
    )
