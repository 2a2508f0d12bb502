"""How far a count has come: one bar on a terminal, plain lines elsewhere. On standard error."""

import os
import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PAUSE = 10.0  # seconds between two plain lines. chosen: as the training console


class Counter:
    """Counts something up to a total.

    Args:
        what: what is counted, for the line's start.
        total: how many there are.
        quiet: show nothing.
    """

    def __init__(self, what: str, total: int, quiet: bool = False) -> None:
        self._what, self._total, self._quiet = what, total, quiet
        self._done = 0
        self._spoke = time.monotonic()
        self._began: float | None = None
        self._began_at = 0
        self._bar: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn(what, markup=False),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                expand=True,
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> "Counter":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def skip(self, count: int) -> None:
        """What was done before this start: it counts, and not towards the rate."""
        self._done += count
        if self._bar:
            self._bar.update(self._task, completed=self._done)

    def add(self, count: int, note: str = "") -> None:
        """`count` more are done."""
        self._done += count
        now = time.monotonic()
        if self._began is None:  # until here, processes were starting: that is no rate
            self._began, self._began_at = now, self._done
        rate = (self._done - self._began_at) / max(now - self._began, 1e-9)
        text = f"{rate:,.0f} a second{note}" if rate > 0 else note.removeprefix(", ")
        if self._bar:
            self._bar.update(self._task, completed=self._done, description=text)
        elif not self._quiet and (now - self._spoke > PAUSE or self._done == self._total):
            self._spoke = now
            share = f"{self._done:,}/{self._total:,} ({self._done / self._total:.0%})"
            left = self._total - self._done
            parts = [share, text, f"{left / rate:.0f} s left" if left and rate > 0 else ""]
            print(
                f"{self._what} {', '.join(filter(None, parts))}",
                file=sys.stderr,
                flush=True,
            )


def discard(stream: TextIO) -> None:
    """Send nowhere what is still to be written, or flushed when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
