"""Rows that `prepare` could read and training cannot."""

from dataclasses import dataclass, field

from pennyclip.data.loader import Batch

SHARE, WINDOW = 0.05, 20
"""Share of unreadable rows in the last so many batches that stops a run. Chosen: `prepare` has
decoded every row, so one is an accident and many are a failing disk."""


@dataclass
class Unreadable:
    """What is remembered of them."""

    rows: list[int] = field(default_factory=list)
    """Over the whole run."""
    counts: list[int] = field(default_factory=list)
    """In each of the last `WINDOW` batches."""
    first: str = ""
    """What was said of the first."""

    def see(self, batch: Batch) -> dict[int, str]:
        """Take in a batch; what is said of those of its rows that are new here."""
        self.counts = [*self.counts, len(batch.unreadable)][-WINDOW:]
        new = {row: why for row, why in batch.unreadable if row not in self.rows}
        self.first = self.first or next(iter(new.values()), "")
        self.rows += new
        return new

    def too_many(self, batch_size: int) -> bool:
        return sum(self.counts) > SHARE * WINDOW * batch_size
