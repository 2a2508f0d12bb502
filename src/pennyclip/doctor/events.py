"""What a run's records say: its events with what to do, whether it is done, and over-fitting."""

import math
import shlex
from pathlib import Path
from typing import Any

from pennyclip.answer import Answer
from pennyclip.errors import RequestError
from pennyclip.report.run import Run, count, mean_recall, read_run
from pennyclip.telemetry.events import remedy

SINCE_PEAK = 3
"""Evaluations after the best one, all lower, before it counts as a peak. Chosen."""


def diagnose(path: Path) -> Answer:
    """Sum up a run's events by their names, in the order in which these came first.

    Raises:
        RequestError: it is no run folder.
    """
    if not (path / "metrics.jsonl").is_file():
        raise RequestError(f"{path} is not a run: expected a folder with metrics.jsonl")
    run = read_run(path)
    found: dict[str, dict[str, Any]] = {}
    for record in run.kind("event"):
        entry = found.setdefault(
            record["name"],
            {
                "count": 0,
                "first": record["step"],
                "message": record["message"],
                "do": remedy(record, path),
            },
        )
        entry |= {"count": entry["count"] + 1, "last": record["step"]}
    lines = []
    for name, entry in found.items():
        steps = f"step {entry['first']}"
        if entry["count"] > 1:
            steps = f"{entry['count']} times, steps {entry['first']} to {entry['last']}; the first"
        lines += [f"{name} ({steps}): {entry['message']}", f"    do: {entry['do']}"]
    if not found:
        lines = [f"{path}: no event in {run.steps} steps"]
    overfit = over_fitting(run)
    if overfit is not None:
        lines += [
            f"over-fitting: {overfit}",
            "    do: eval, search and export take the best checkpoint unless told otherwise. The "
            "next run: fewer epochs, more or more varied pairs, fewer layers that learn",
        ]
    state, words = run.state
    unfinished = None if state == "done" else words
    if unfinished is not None:
        lines += [
            f"not finished: {words}",
            f"    do: go on with pennyclip train --resume {shlex.quote(str(path))}",
        ]
    tree = {"run": str(path), "unfinished": unfinished, "over_fitting": overfit, "events": found}
    return Answer("\n".join(lines), tree)


def over_fitting(run: Run) -> str | None:
    """In words, whether the training loss went on falling behind a peak of the held-out recall.

    A peak stands out where the last `SINCE_PEAK` evaluations lie more than a standard error of a
    share, sqrt(p (1 - p) / images), below it.
    """
    choosing = [r for r in run.choosing if math.isfinite(mean_recall(r))]
    peak = next((r for r in choosing if r["step"] == run.best_step), None)
    since = [] if peak is None else choosing[choosing.index(peak) + 1 :]
    if peak is None or len(since) < SINCE_PEAK:
        return None
    best, last = mean_recall(peak), max(map(mean_recall, since[-SINCE_PEAK:]))
    images = count(peak, "images")
    if not images > 0:
        images = run.subsets.get(run.choosing_split, math.nan)
    losses = {r["step"]: float(r["loss"]) for r in run.kind("train") if not r.get("abandoned")}
    before = [loss for step, loss in losses.items() if step <= peak["step"]]
    if not before or not math.isfinite(images):
        return None
    now = losses[max(losses)]
    if last > best - math.sqrt(best * (1 - best) / images) or not now < before[-1]:
        return None
    return (
        f"mean recall on '{run.choosing_split}' was highest at step {peak['step']} ({best:.1%}) "
        f"and is {mean_recall(since[-1]):.1%} at step {since[-1]['step']}, while the training loss "
        f"fell from {before[-1]:.2f} to {now:.2f}"
    )
