"""What a person sees while a run goes on: one progress bar on a terminal, plain lines elsewhere.

All on standard error; standard output belongs to results.
"""

import math
import sys
import time
from collections.abc import Sequence

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from pennyclip.base.progress import discard
from pennyclip.training.telemetry.metrics import Record, rates_by_part

PAUSE = 10.0  # seconds between two plain lines of progress. chosen: a log, not a bar
SILENCE = 60.0  # seconds after which updates are told without numbers. chosen: before one wonders


class Console:
    """Shows a run's progress.

    Args:
        total_steps: updates in the whole run.
        start_step: updates that were done before this start (a resume).
        quiet: show nothing.
    """

    def __init__(self, total_steps: int, start_step: int = 0, quiet: bool = False) -> None:
        self._total, self._start, self._quiet = total_steps, start_step, quiet
        self._began = self._spoke = time.monotonic()
        self._done, self._none_told = start_step, True
        self._end, self._stage = total_steps, ""
        self._bar: Progress | None = None
        if not quiet and sys.stderr.isatty():
            self._bar = Progress(
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                console=Terminal(stderr=True),
                expand=True,
                refresh_per_second=2,  # chosen: the numbers change less often than that
            )
            self._task = self._bar.add_task("", total=total_steps, completed=start_step)
            self._bar.start()

    def enter_stage(self, number: int, ends: Sequence[int]) -> None:
        """From here on, updates cost what this stage's do: time is told up to its end.

        Args:
            number: of the stage, from 0.
            ends: updates made when each stage has ended.
        """
        self._start, self._began = self._done, time.monotonic()
        self._end = ends[number]
        later = number + 1 < len(ends)
        self._stage = f" of stage {number + 1} of {len(ends)}, later ones unknown" if later else ""

    def update(self, step: int, record: Record | None = None) -> None:
        """Show that `step` updates of the run are done.

        Args:
            step: counted over the whole run.
            record: the `train` record that was made of it; None: none was. Then the bar moves, and
                a plain line comes for a start's first update, and where none came for SILENCE.
        """
        self._done = step
        if self._quiet:
            return
        if record is None and self._bar:
            self._bar.update(self._task, completed=step)
            return
        if record is None and not self._none_told and time.monotonic() - self._spoke < SILENCE:
            return
        self._none_told = False
        numbers = ", ".join([f"ETA {self._remaining(step)}", *describe(record or {})])
        if self._bar:
            self._bar.update(self._task, completed=step, description=numbers)
        else:
            share = step / self._total
            self._print(f"step {step}/{self._total} ({share:.0%}), {numbers}")

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far something is that comes before or between updates."""
        line = f"{what} {done:,}/{total:,}"
        now = time.monotonic()
        self._start, self._began = self._done, now  # the rate to come is that of updates
        if self._bar:
            self._bar.update(self._task, description=line)
        elif not self._quiet and (done == total or now - self._spoke > PAUSE):
            self._print(line)

    def say(self, message: str) -> None:
        """Show a message on a line of its own."""
        if self._bar:
            self._bar.console.print(message, markup=False, highlight=False)
        elif not self._quiet:
            self._print(message)

    def close(self) -> None:
        """Leave the terminal as it was. Safe to call twice."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _remaining(self, step: int) -> str:
        """Hours, minutes and seconds to the stage's end, at its mean rate in this start."""
        if step <= self._start:
            return "?"
        elapsed = time.monotonic() - self._began
        seconds = round((self._end - step) * elapsed / (step - self._start))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}{self._stage}"

    def _print(self, line: str) -> None:
        self._spoke = time.monotonic()
        try:
            print(line, file=sys.stderr, flush=True)
        except BrokenPipeError:  # whoever read along has gone; the run goes on without
            self._quiet = True
            discard(sys.stderr)


def describe(record: Record) -> list[str]:
    """The numbers of a `train` record in words; those that it lacks are left out."""
    parts = []
    if "samples_per_second" in record:
        parts.append(f"{float(record['samples_per_second']):,.0f} samples/s")
    if "loss" in record:
        parts.append(f"loss {float(record['loss']):.3f}")
    if "logit_scale" in record:
        parts.append(f"temperature {math.exp(min(-float(record['logit_scale']), 50.0)):.4f}")
    if rates := record.get("lr"):
        shown = {part: f"{rate:.1e}" for part, rate in rates_by_part(rates).items()}
        if len(set(shown.values())) == 1:
            parts.append(f"lr {next(iter(shown.values()))}")
        else:
            parts.append("lr " + " ".join(f"{part} {rate}" for part, rate in shown.items()))
    if "input_wait" in record:
        parts.append(f"input wait {float(record['input_wait']):.0%}")
    return parts
