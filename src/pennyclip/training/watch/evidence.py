"""What an event names as suspicious: layers whose gradient has jumped, rows that lose most."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pennyclip.data.loader import Batch
from pennyclip.loss import Features
from pennyclip.loss.row_losses import row_losses

RECENT = 10
"""Batches among which the jump is looked for. What makes a loss rise has happened up to 8 before:
Wortsman et al. 2023 (arXiv 2304.13013)."""
NORMAL = 30
"""Batches before these that say what is normal for a layer. Chosen: as many as for the loss."""
JUMP = 3.0
"""How many times its normal norm a layer's gradient must have to be named. Chosen: a healthy
layer's stay within twice their median."""
LAYERS, ROWS = 3, 8
"""How many an event names; all rows of a batch follow from the seed and the step."""


@dataclass
class Evidence:
    """What is remembered of the last batches, to be named if something goes wrong."""

    norms: dict[str, list[float]] = field(default_factory=dict)
    """By layer, of the last `RECENT + NORMAL` batches, skipped ones too."""
    rows: list[tuple[float, int, int]] = field(default_factory=list)
    """Loss, row and batch of those that lose most in the batches that deviate."""

    def see_norms(self, norms: Mapping[str, float]) -> None:
        """Take in the gradient norm of every layer in a batch."""
        for layer, norm in norms.items():
            known = [*self.norms.get(layer, ()), norm if math.isfinite(norm) else math.inf]
            self.norms[layer] = known[-RECENT - NORMAL :]

    def see_rows(self, step: int, batch: Batch, features: Features) -> None:
        """Take in a batch whose loss deviates."""
        worst = [(loss, row, step) for loss, row in worst_rows(batch, features)]
        self.rows = sorted([*self.rows, *worst], reverse=True)[:ROWS]

    def forget(self) -> None:
        """The run has gone back: what was recent is of weights that are no more."""
        self.norms = {layer: norms[:-RECENT] for layer, norms in self.norms.items()}
        self.rows = []

    def suspects(self, step: int) -> dict[str, Any]:
        """What to write into the event of batch `step`, as far as there is any.

        Returns:
            `rows`, their `row_losses` and the `batches` they stood in; and what `jumps` gives.
        """
        if not self.rows:
            return self.jumps(step)
        losses, rows, batches = (list(column) for column in zip(*self.rows, strict=True))
        return {"rows": rows, "row_losses": losses, "batches": batches} | self.jumps(step)

    def jumps(self, step: int) -> dict[str, Any]:
        """Layers whose gradient has jumped within the last `RECENT` batches, `step` the last.

        Returns:
            `gradient_jumps`, or nothing: by layer, how many `times` its normal norm it had, at
            most, and in which `batch` it first had `JUMP` times. Those first that jumped first. A
            norm that is not finite says nothing: it seldom comes alone.
        """
        jumps = {}
        for layer, norms in self.norms.items():
            before, recent = norms[:-RECENT], norms[-RECENT:]
            if len(before) < RECENT or not 0 < (normal := median(before)) < math.inf:
                continue
            times = [norm / normal if norm < math.inf else 0.0 for norm in recent]
            first = next((n for n, t in enumerate(times) if t >= JUMP), None)
            if first is not None:
                jumps[layer] = {"times": max(times), "batch": step - len(recent) + 1 + first}
        order = sorted(jumps, key=lambda layer: (jumps[layer]["batch"], -jumps[layer]["times"]))
        return (
            {"gradient_jumps": {layer: jumps[layer] for layer in order[:LAYERS]}} if jumps else {}
        )

    def silent(self) -> list[str]:
        """Layers whose gradient was exactly zero in each of the last `RECENT` batches."""
        return [
            layer
            for layer, norms in self.norms.items()
            if len(norms) >= RECENT and not any(norms[-RECENT:])
        ]


def worst_rows(batch: Batch, features: Features) -> list[tuple[float, int]]:
    """Loss and row of the `ROWS` pairs of a batch that lose most. Waits for the device."""
    losses = row_losses(features)
    largest, places = losses.topk(min(ROWS, len(losses)))
    rows = batch.rows[places.cpu()]
    return list(zip(largest.tolist(), rows.tolist(), strict=True))
