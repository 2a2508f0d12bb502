"""Every precision on this machine and this data, side by side: time, memory, accuracy.

Of each precision: a short real run of one stage with its own schedule, evaluated eight times. Its
updates give the time of an epoch, its evaluations the final accuracy and how many pairs it took to
come near the first precision's best. Then the most memory that updates at the recipe's batch size
take and the largest batch that fits (`bench batch-size`, a process of its own).
"""

import math
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pennyclip.base.errors import RequestError, RunError
from pennyclip.commands.bench.batch_size import BatchSizes, measure_batch_sizes
from pennyclip.commands.bench.sizes import PATIENCE, Ending, check_up_to
from pennyclip.commands.bench.workbench import stage_number
from pennyclip.config.keys import Config, LossScaling, Precision
from pennyclip.evaluation.retrieval import mean_chance
from pennyclip.training.loop import train
from pennyclip.training.run import run_device
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.training.update.precision import choose
from pennyclip.training.update.scaling import is_scaled
from pennyclip.training.watch.symptoms import no_better_than_guessing

ROUNDED = "pure-bf16-stochastic"
CANDIDATES: dict[str, Precision] = {
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "fp16": "fp16",
    "pure-bf16": "pure-bf16",
    ROUNDED: "pure-bf16",
    "pure-fp16": "pure-fp16",
}
"""By the names in the table; the stochastic one keeps no float32 masters."""
NEAR = 0.9
"""The share of the first precision's best score that a run has to reach. Chosen: earlier, scores
are noise; later, they are the last digits."""
EVALUATIONS = 8  # in a run. chosen: what is seen of its course
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """What was measured of one precision."""

    name: str
    epoch_seconds: float | None = None
    """Of an epoch's updates, without evaluating and saving; None: the run broke off."""
    peak_bytes: int | None = None
    """At the recipe's batch size; None: that was not run whole."""
    largest: int | None = None
    """Pairs."""
    ended_by: Ending | None = None
    """What kept larger ones from being run; only memory says that they would not fit."""
    score: float | None = None
    """Mean recall on the development split at the end."""
    chance: float | None = None
    """That of guessing there."""
    samples_to_near: int | None = None
    """Pairs seen until the score was NEAR the best of the first row; None: never, or that best
    can't be told from guessing."""
    course: tuple[tuple[int, float], ...] = ()
    """Pairs seen, and the score there."""
    skipped: int = 0
    """Batches that overflowed."""
    failure: str = ""


@dataclass(frozen=True)
class Precisions:
    """The table."""

    device: str
    stage: str
    batch_size: int
    epochs: float
    """That the runs took."""
    updates: int
    rows: tuple[Row, ...]

    HEADER = (
        "precision",
        "s an epoch",
        "speed",
        "peak MiB",
        "largest batch",
        "ended by",
        "mean recall",
        "chance",
        f"pairs to {NEAR:.0%}",
        "skipped",
    )

    def cells(self) -> list[list[str]]:
        """The table's rows, as text."""
        first = self.rows[0].epoch_seconds
        out = []
        for row in self.rows:
            seconds = row.epoch_seconds
            speed = f"{first / seconds:.2f}" if first and seconds else "–"
            untried = "≥ " if row.ended_by != "memory" else ""
            out.append(
                [
                    row.name,
                    f"{seconds:,.1f}" if seconds else "–",
                    speed,
                    f"{row.peak_bytes / MIB:,.0f}" if row.peak_bytes else "–",
                    f"{untried}{row.largest:,}" if row.largest else "–",
                    row.ended_by or "–",
                    f"{row.score:.1%}" if row.score is not None else "–",
                    f"{row.chance:.1%}" if row.chance is not None else "–",
                    f"{row.samples_to_near:,}" if row.samples_to_near else "–",
                    f"{row.skipped}",
                ]
            )
        return out

    @property
    def notes(self) -> list[str]:
        """What the numbers are, and what they are not."""
        extrapolated = ", extrapolated" if self.epochs < 1 else ""
        lines = [
            f"{self.device}; {self.stage}; batch {self.batch_size}",
            f"Each run: {self.epochs:g} epochs, {self.updates} updates, from the same start on the "
            f"same batches. Time an epoch: from these updates{extrapolated}. Recall: on the "
            "development split, beside that of guessing; one run each, so small differences are "
            "noise.",
            f"Pairs to {NEAR:.0%}: seen until the recall was {NEAR:.0%} of the best that "
            f"{self.rows[0].name} had; – where it never was, or that best can't be told from "
            "guessing.",
            f"Peak memory: of a process that makes updates at batch {self.batch_size}, libraries "
            "included; – where so many pairs do not fit whole, or were not asked for.",
            "Largest batch: ended by memory, it is the largest that leaves a margin free; ended by "
            f"rows (no more to train on), time (an update took more than {PATIENCE:.0f} s) or "
            "up-to, larger ones were not tried.",
        ]
        return lines + [f"{row.name}: {row.failure}" for row in self.rows if row.failure]

    def __str__(self) -> str:
        table = [list(self.HEADER), *self.cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            for cells in table
        ]
        return "\n".join([self.notes[0], "", *lines, "", *self.notes[1:]])


def measure_precisions(
    config: Config,
    *,
    among: Iterable[str] = (),
    stage: int | None = None,
    epochs: float = 1.0,
    up_to: int | None = None,
    runs: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Precisions:
    """Measure precisions side by side.

    Args:
        config: with its data.
        among: names of CANDIDATES; none: all that the device has, on CPUs without those in
            float16, which is emulated there (an update of a small model can take a minute).
        stage: from 1; None: the first.
        epochs: length of each run.
        up_to: largest batch to try; None: as far as memory, rows or PATIENCE allow.
        runs: where the runs are kept; None: they are not.
        say: is told what is being measured.

    Raises:
        RequestError: there is no such precision, or the recipe could not be trained as it stands.
        RunError: no precision could be measured.
        KeyboardInterrupt: a signal stopped one of the runs.
    """
    number = stage_number(config, stage, 0)
    check_up_to(up_to)
    if not 0 < epochs < math.inf:
        raise RequestError(f"epochs = {epochs:g}: expected a number above 0")
    device = run_device()
    short = replace(config.stages[number], epochs=epochs, samples=None)
    config = replace(
        config,
        stages=(short,),
        log_every=1,
        evaluate=replace(config.evaluate, every_epochs=epochs / EVALUATIONS),
        checkpoint=replace(config.checkpoint, keep=1),
    )
    names = _names(tuple(among), device)
    rows: list[Row] = []
    sizes, updates = None, 0
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            own = _with_precision(config, name)
            row = Row(name)
            say(f"{name}: a run")
            try:
                out = (runs or Path(temporary)) / name
                row, updates = _run(row, own, out, rows[0] if rows else None)
            except RunError as error:
                row = replace(row, failure=str(error))
            # After the run: frozen layers' features, which it stored, need no room any more.
            say(f"{name}: memory")
            try:
                sizes = measure_batch_sizes(own, up_to=up_to, rounds=1)
                row = _memory(row, sizes, config.batch_size)
            except RunError as error:
                row = replace(row, failure=f"{row.failure} {error}".strip())
            rows.append(row)
    if sizes is None:
        raise RunError(f"no precision's memory could be measured: {rows[-1].failure}")
    return Precisions(sizes.device, sizes.stage, config.batch_size, epochs, updates, tuple(rows))


def _names(among: tuple[str, ...], device: torch.device) -> list[str]:
    for name in among:
        if name not in CANDIDATES:
            raise RequestError(f"precision '{name}': known are {', '.join(CANDIDATES)}")
        choose(CANDIDATES[name], device, 0)  # refuses what the device has not
    if among:
        return list(dict.fromkeys(among))
    names = []
    for name, precision in CANDIDATES.items():
        if device.type == "cpu" and precision in ("fp16", "pure-fp16"):
            continue
        with suppress(RequestError):
            choose(precision, device, 0)
            names.append(name)
    return names


def _with_precision(config: Config, name: str) -> Config:
    """The recipe in a precision, without what it says of others."""
    precision = CANDIDATES[name]
    optim = replace(config.optim, stochastic_rounding=name == ROUNDED)
    if precision in ("fp32", "tf32"):
        optim = replace(optim, lr_scale=1.0)
    scaling = config.loss_scaling if is_scaled(config, precision) else LossScaling()
    return replace(config, precision=precision, optim=optim, loss_scaling=scaling)


def _memory(row: Row, sizes: BatchSizes, batch_size: int) -> Row:
    peak = next((s.peak_bytes for s in sizes.sizes if s.pairs == batch_size), None)
    return replace(row, peak_bytes=peak, largest=sizes.largest, ended_by=sizes.ended_by)


def _run(row: Row, config: Config, out: Path, first: Row | None) -> tuple[Row, int]:
    """Train, and read what came of it."""
    if train(config, out, quiet=True).exit_code:
        raise KeyboardInterrupt  # the run took the signal as its own, and has saved and stopped
    records = read_metrics(out / "metrics.jsonl")
    updates = [r for r in records if r["kind"] == "train"]
    found = [r for r in records if r["kind"] == "eval"]
    scores = [(r["step"] * config.batch_size, r["metrics"]["mean_recall"]) for r in found]
    best = max((s for _, s in (first.course if first else scores)), default=math.inf)
    chance = None
    if found:
        images, captions = (found[-1]["metrics"][name] for name in ("images", "captions"))
        chance = mean_chance(images, captions)
        if no_better_than_guessing(best, chance, int(images), alike=False):
            best = math.inf  # what is near to it says nothing
    return replace(
        row,
        epoch_seconds=_epoch_seconds(updates, config.batch_size),
        score=scores[-1][1] if scores else None,
        chance=chance,
        samples_to_near=next((pairs for pairs, score in scores if score >= NEAR * best), None),
        course=tuple(scores),
        skipped=updates[-1]["skipped"],
    ), len(updates)


def _epoch_seconds(updates: list[dict[str, Any]], batch_size: int) -> float:
    """From the median update: the first ones build caches, and others share the machine."""
    speeds = sorted(r["samples_per_second"] for r in updates)
    rows = updates[-1]["samples"] / updates[-1]["epoch"]
    return rows / speeds[len(speeds) // 2]
