"""What a run's records say: its events with what to do, whether it is done, and over-fitting."""

import math
from pathlib import Path
from typing import Any

from pennyclip.base.errors import RequestError
from pennyclip.commands.answer import Answer
from pennyclip.reporting.run import Run, count, mean_recall, read_run
from pennyclip.training.telemetry.events import remedy

SINCE_PEAK = 3
"""Evaluations after the best one, all lower, before it counts as a peak. Chosen."""

UNDONE = "undone by a resume from before it"
RESUMED = "resumed since"


def diagnose(path: Path) -> Answer:
    """Sum up a run's events by their names, in the order in which these came first.

    What a resume has undone, and stops from which the run went on, are told apart, as its past.

    Raises:
        RequestError: it is no run folder.
    """
    if not (path / "metrics.jsonl").is_file():
        raise RequestError(f"{path} is not a run: expected a folder with metrics.jsonl")
    run = read_run(path)
    found: dict[str, dict[str, Any]] = {}
    past: dict[tuple[str, str], dict[str, Any]] = {}
    for record in run.kind("event"):
        name, step, message = record["name"], record["step"], record["message"]
        if run.is_past(record):
            why = RESUMED if name == "stopped" else UNDONE
            new = {"name": name, "why": why, "count": 0, "first": step, "message": message}
            entry = past.setdefault((name, why), new)
        else:
            new = {"count": 0, "first": step, "message": message, "do": remedy(record, path)}
            entry = found.setdefault(name, new)
        entry |= {"count": entry["count"] + 1, "last": step}
    lines = []
    for name, entry in found.items():
        lines.append(f"{name} ({_steps(entry)}): {entry['message']}")
        lines += [f"    do: {entry['do']}"] * bool(entry["do"])
    if not found:
        lines = [f"{path}: no event in {run.steps} steps"]
    if past:
        lines.append("past, nothing to do:")
    for entry in past.values():
        told = f"{entry['name']} ({_steps(entry)}), {entry['why']}: {entry['message']}"
        lines.append(f"    {told}")
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
            f"    do: {run.way_on}",
        ]
    tree = {
        "run": str(path),
        "unfinished": unfinished,
        "over_fitting": overfit,
        "events": found,
        "past": list(past.values()),
    }
    return Answer("\n".join(lines), tree)


def _steps(entry: dict[str, Any]) -> str:
    if entry["count"] == 1:
        return f"step {entry['first']}"
    return f"{entry['count']} times, steps {entry['first']} to {entry['last']}; the first"


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
