"""metrics.jsonl: what a run writes about itself, one JSON object a line. The source of truth.

Every record has `kind`, `step` (updates done) and `time` (UTC, ISO 8601). By kind, further:

    start       at each start or resume: request, machine, versions, parameters, precision and why,
                perhaps weights
    train       every log_every batches, and for those from which no update was made: samples,
                epoch, loss, logit_scale (the log, as the model owns it), lr by group,
                grad_norm (before clipping), clipped (share of updates), grad_norms and grad_means
                (of the gradient before clipping, by layer that learns), accuracy (in the batch),
                candidates (pairs a row is told apart from, itself included), samples_per_second,
                input_wait (share of the time), seconds, skipped (batches of the run from which no
                update was made or kept), image_cosine and text_cosine (mean over different pairs of
                the batch: 1 where all embeddings are one), micro_batch (pairs in the towers at a
                time); in fp16 also loss_scale, overflows (in the run); under LAMB trust_ratio by
                group
    eval        split, metrics by name; `checkpoint` where it was made after the run
    checkpoint  path, seconds
    event       name, message, and evidence by name: rows, tensor, ... (names: `events.py`);
                `abandoned` where the run went on from a checkpoint before it
    end         reason: "finished", "signal SIGTERM", ...
"""

import json
import math
import os
import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pennyclip.base.atomic import replacing
from pennyclip.base.errors import RunError

Record = dict[str, Any]
EVIDENCE = ("start", "event", "end")
"""Kinds of records that say what happened to a run, whether or not it went on from there."""


class Metrics:
    """Appends records to a metrics.jsonl. A record is on its way to the disk when `log` returns.

    Args:
        path: the file; made where it does not exist.
        resume_step: updates done in the checkpoint that the run goes on from. Records of later
            steps are dropped, because the run makes them again; events and how it ended are kept as
            evidence, marked as `abandoned`. None keeps all.

    What a killed process left half written at the end is dropped in either case.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self.path = Path(path)
        if self.path.exists():
            records = read_metrics(self.path)
            if resume_step is not None:
                records = [
                    record if record["step"] <= resume_step else record | {"abandoned": True}
                    for record in records
                    if record["step"] <= resume_step or record["kind"] in EVIDENCE
                ]
            content = b"".join(map(_line, records))
            if content != self.path.read_bytes():
                with replacing(self.path) as partial:
                    partial.write_bytes(content)
        self._file = self.path.open("ab")
        self.step = resume_step or 0
        """Of the last record."""

    def log(self, kind: str, step: int, **fields: Any) -> None:
        """Append one record. Numbers that are not finite become "nan", "inf" or "-inf".

        Raises:
            RunError: the line could not be written.
        """
        self.step = step
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            self._file.write(_line({"kind": kind, "step": step, "time": now} | fields))
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"{self.path}: the '{kind}' record of step {step} could not be written: {error}. "
                "Make room there, then go on with: pennyclip train --resume "
                f"{shlex.quote(str(self.path.parent))}"
            ) from error

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[Record]:
    """All records of a metrics.jsonl, in the order in which they were written.

    An unreadable last line is what a killed process leaves, and is passed over. One elsewhere
    (a disk's fault) stands as an event that names it: one bad line costs that line.
    """
    lines = Path(path).read_bytes().rstrip(b"\n").split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not (isinstance(record["kind"], str) and isinstance(record["step"], int)):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                records.append(
                    {
                        "kind": "event",
                        "step": records[-1]["step"] if records else 0,
                        "name": "unreadable record",
                        "message": f"line {number} of {Path(path).name} could not be read",
                    }
                )
            continue
        records.append(record)
    return records


def _line(record: Record) -> bytes:
    # ASCII only: a file name that is not valid Unicode cannot make the write fail.
    return json.dumps(plain(record), allow_nan=False).encode("ascii") + b"\n"


def plain(value: Any) -> Any:
    """Strict JSON: JSON knows no number that is not finite, and no array scalar.

    Such numbers become "nan", "inf" or "-inf".
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if hasattr(value, "item"):  # a numpy or torch scalar
        return plain(value.item())
    return value


def rates_by_part(rates: dict[str, Any]) -> dict[str, float]:
    """The largest rate of each part, from rates by group such as `image.3.no_decay`."""
    parts: dict[str, float] = {}
    for group, rate in rates.items():
        part = group.split(".")[0]
        parts[part] = max(parts.get(part, 0.0), float(rate))
    return parts


def layer_order(lists: Iterable[list[str]]) -> list[str]:
    """All layers of several records, in the order of the model: stages let different ones learn."""
    order: list[str] = []
    for names in lists:
        place = 0
        for name in names:
            if name in order:
                place = order.index(name) + 1
            else:
                order.insert(place, name)
                place += 1
    return order
