"""A run's events, each with what to do about it."""

from pathlib import Path
from typing import Any

from pennyclip.answer import Answer
from pennyclip.errors import RequestError
from pennyclip.telemetry.events import REMEDIES
from pennyclip.telemetry.metrics import read_metrics


def diagnose(run: Path) -> Answer:
    """Sum up a run's events by their names, in the order in which these came first.

    Raises:
        RequestError: it is no run folder.
    """
    file = run / "metrics.jsonl"
    if not file.is_file():
        raise RequestError(f"{run} is not a run: expected a folder with metrics.jsonl")
    records = read_metrics(file)
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["kind"] == "event":
            entry = found.setdefault(
                record["name"],
                {
                    "count": 0,
                    "first": record["step"],
                    "message": record["message"],
                    "do": REMEDIES.get(record["name"], ""),
                },
            )
            entry |= {"count": entry["count"] + 1, "last": record["step"]}
    lines = []
    for name, entry in found.items():
        steps = f"step {entry['first']}"
        if entry["count"] > 1:
            steps = f"{entry['count']} times, steps {entry['first']} to {entry['last']}; the first"
        lines += [f"{name} ({steps}): {entry['message']}", f"    do: {entry['do']}"]
    if not lines:
        lines = [f"{run}: no event in {max((r['step'] for r in records), default=0)} steps"]
    return Answer("\n".join(lines), {"run": str(run), "events": found})
