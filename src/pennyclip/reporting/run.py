"""A run folder as the report reads it: whatever of it is there, and in words what is not."""

import json
import math
import shlex
import tomllib
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from pennyclip.base.errors import RequestError
from pennyclip.evaluation.retrieval import chance as guessing
from pennyclip.reporting.words import duration, number
from pennyclip.training.telemetry.metrics import Record, read_metrics

DIRECTIONS = ("text_to_image", "image_to_text")
CUTOFFS = (1, 5, 10)


@dataclass(frozen=True)
class Run:
    """What a run folder holds. A missing part is empty, and `problems` says why."""

    path: Path
    records: list[Record]
    config_text: str
    config: dict[str, Any]
    data: str
    """The dataset's folder; empty where it is not recorded."""
    dataset: dict[str, Any]
    """The dataset's dataset.json."""
    subsets: dict[str, int]
    """Images in each of the dataset's splits and filters."""
    examples: dict[str, Any]
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def kind(self, name: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == name]

    @property
    def start(self) -> Record:
        """The newest start or resume."""
        return self.kind("start")[-1] if self.kind("start") else {}

    @property
    def loss(self) -> str:
        """The loss's name, as recipes have it."""
        return str((self.start.get("request") or {}).get("loss", "infonce"))

    @property
    def last_train(self) -> Record:
        return self.kind("train")[-1] if self.kind("train") else {}

    @property
    def steps(self) -> int:
        """Updates done."""
        mine = (r for r in self.records if r["kind"] != "eval" and not r.get("abandoned"))
        return max((record["step"] for record in mine), default=0)

    @cached_property
    def evaluations(self) -> list[Record]:
        """One a (step, split, checkpoint, set of metrics): what was measured again replaces."""
        newest: dict[Any, Record] = {}
        for record in self.kind("eval"):
            metrics = record.get("metrics")
            if isinstance(metrics, dict) and metrics:
                same = (record["step"], record.get("split"), record.get("checkpoint"))
                newest[same, tuple(sorted(metrics))] = record
        return sorted(newest.values(), key=lambda record: record["step"])

    @property
    def retrievals(self) -> list[Record]:
        return [record for record in self.evaluations if is_retrieval(record)]

    @property
    def others(self) -> list[Record]:
        """Evaluations other than retrieval, such as zero-shot classification."""
        return [record for record in self.evaluations if not is_retrieval(record)]

    @property
    def choosing_split(self) -> str:
        """The split that was evaluated during the run, by which the best checkpoint is chosen."""
        during = [r.get("split") for r in self.retrievals if "checkpoint" not in r]
        configured = self.config.get("evaluate", {}).get("split", "dev")
        return str(max(during, key=during.count)) if during else str(configured)

    @property
    def choosing(self) -> list[Record]:
        return [
            record
            for record in self.retrievals
            if record.get("split") == self.choosing_split and "checkpoint" not in record
        ]

    @property
    def best_step(self) -> int | None:
        """The step with the highest mean recall; the earliest, as the trainer keeps it."""
        finite = [record for record in self.choosing if math.isfinite(mean_recall(record))]
        if finite:
            return int(max(finite, key=mean_recall)["step"])
        named = [r["step"] for r in self.evaluations if r.get("checkpoint") == "best"]
        return int(named[-1]) if named else None

    @property
    def final(self) -> Record:
        """The evaluation for the headline: held-out where there is one, else the best so far."""
        held_out = [r for r in self.retrievals if r.get("split") != self.choosing_split]
        return self.on(held_out[-1]["split"] if held_out else self.choosing_split)

    def on(self, split: str) -> Record:
        """The evaluation on a split, of the best checkpoint where there is one; else empty."""
        if split == self.choosing_split:
            return next((r for r in self.choosing if r["step"] == self.best_step), {})
        found = [record for record in self.retrievals if record.get("split") == split]
        best = [record for record in found if record.get("checkpoint") == "best"]
        return (best or found or [{}])[-1]

    @property
    def parts(self) -> list[list[Record]]:
        """The records of each process: from one start or resume to the next."""
        parts: list[list[Record]] = []
        for record in self.records:
            if record["kind"] == "start" or not parts:
                parts.append([])
            if "checkpoint" not in record or record["kind"] != "eval":
                parts[-1].append(record)
        return parts

    def is_past(self, event: Record) -> bool:
        """Whether an event calls for nothing any more: a resume has undone the updates that it was
        about, or it is a stop from which the run went on."""
        if event.get("abandoned"):
            return True
        return event.get("name") == "stopped" and all(event is not r for r in self.parts[-1])

    @property
    def seconds(self) -> float:
        """Wall-clock time over all processes; of one that was killed, up to its last record."""
        return sum(part_seconds(part) for part in self.parts)

    @property
    def update_seconds(self) -> float:
        """Of `seconds`, what went into updates; the rest: evaluations, saves, stored features."""
        batch, total = number(self.config.get("batch_size")), 0.0
        for part in self.parts:
            step = part[0]["step"]
            for record in part:
                rate = number(record.get("samples_per_second"))
                if record["kind"] == "train" and rate > 0:
                    total += (record["step"] - step) * batch / rate
                    step = record["step"]
        return total

    @property
    def state(self) -> tuple[str, str]:
        """("done" | "stopped" | "open", a sentence)."""
        last = self.parts[-1] if self.parts else []
        ends = [record for record in last if record["kind"] == "end"]
        if ends and ends[-1].get("reason") == "finished":
            return "done", "finished"
        if ends:
            why = ends[-1].get("reason")
            causes = [r["message"] for r in last if r.get("name") == "stopped" and "message" in r]
            if causes:
                why = causes[-1]
            return "stopped", f"stopped at step {ends[-1]['step']:,}: {why}"
        if not self.records:
            return "open", "nothing recorded yet"
        return "open", f"still going, or killed, at step {self.steps:,}"

    @property
    def way_on(self) -> str:
        """What to do about a run that is not finished, as a sentence."""
        run = shlex.quote(str(self.path))
        live = {r["name"] for r in self.kind("event") if not self.is_past(r) and "name" in r}
        if not live >= {"stopped", "rolled back"}:
            return f"Go on with: pennyclip train --resume {run}"
        start = "from the same start"
        if self.best_step is not None:
            start += (
                f", or --init {run} if its best checkpoint (step {self.best_step}) is a good one"
            )
        return (
            "It broke by itself, and would again. Begin a new run with a lower optim.lr (pennyclip "
            f"bench rate finds one), a longer warm-up, or without the rows that are named, {start}"
        )


def read_run(path: Path) -> Run:
    """Read what is there of a run folder.

    Raises:
        RequestError: it is no run folder.
    """
    if not (path / "config.toml").is_file() and not (path / "metrics.jsonl").is_file():
        raise RequestError(
            f"{path} is not a run: expected a folder with config.toml and metrics.jsonl, as "
            "'pennyclip train' writes it, and found neither."
        )
    problems: list[str] = []
    records: list[Record] = []
    if (path / "metrics.jsonl").is_file():
        records = read_metrics(path / "metrics.jsonl")
    else:
        problems.append("There is no metrics.jsonl: the run has recorded nothing yet.")
    text, config = "", {}
    try:
        text = (path / "config.toml").read_text(encoding="utf-8")
        config = tomllib.loads(text)
    except (OSError, ValueError) as error:
        problems.append(f"config.toml could not be read: {error}")

    starts = [record for record in records if record["kind"] == "start"]
    request = (starts[-1].get("request") if starts else None) or config
    data = str(request.get("data") or "")
    dataset: dict[str, Any] = {}
    subsets: dict[str, int] = {}
    if data:
        dataset = _read_json(Path(data) / "dataset.json", problems)
        for file in sorted((Path(data) / "keep").glob("*.parquet")):
            subsets[file.stem] = pq.read_metadata(file).num_rows
    examples = {}
    if (path / "examples.json").is_file():
        examples = _read_json(path / "examples.json", problems)
    return Run(path, records, text, config, data, dataset, subsets, examples, problems)


def is_retrieval(record: Record) -> bool:
    return any(name.startswith(DIRECTIONS) for name in record["metrics"])


def recall(record: Record, direction: str, k: int) -> float:
    """A share of 0..1; nan where it was not measured."""
    return number(record.get("metrics", {}).get(f"{direction}/R@{k}"))


def mean_recall(record: Record) -> float:
    """Over all recalls; by it the trainer chooses the best checkpoint."""
    return number(record.get("metrics", {}).get("mean_recall"))


def count(record: Record, name: str) -> float:
    """How many images, captions or classes an evaluation had; nan where it does not say."""
    return number(record.get(name, record.get("metrics", {}).get(name)))


def chance(run: Run, record: Record, k: int, direction: str = "text_to_image") -> float:
    """Expected recall of random guessing; nan where nothing says how many images there are."""
    images = count(record, "images")
    if not images > 0:
        images = run.subsets.get(str(record.get("split")), math.nan)
    return guessing(images, count(record, "captions"), k, direction) if images > k else math.nan


class Entry(NamedTuple):
    """Something out of the ordinary in a run."""

    step: int
    name: str
    message: str
    evidence: dict[str, Any]
    past: bool = True
    """Nothing is to be done about it any more."""


def timeline(run: Run) -> list[Entry]:
    """Everything out of the ordinary, in order."""
    told: list[Entry] = []
    known = {"kind", "step", "time", "name", "message", "abandoned"}
    for index, part in enumerate(run.parts):
        if index:
            reason = "after a stop"
            if not any(record["kind"] == "end" for record in run.parts[index - 1]):
                reason = "the process before it ended without a word: killed, or the machine failed"
            told.append(Entry(part[0]["step"], "resumed", reason, {}))
        for record in part:
            if record["kind"] == "event":
                evidence = {key: value for key, value in record.items() if key not in known}
                name, message = str(record.get("name", "event")), str(record.get("message", ""))
                if record.get("abandoned"):
                    message += " (Since then the run was resumed from before this step.)"
                told.append(Entry(record["step"], name, message, evidence, run.is_past(record)))
            elif record["kind"] == "end":
                took = duration(part_seconds(part))
                reason = f"{record.get('reason')}, after {took}"
                told.append(Entry(record["step"], "end", reason, {}))
    return told


def part_seconds(part: list[Record]) -> float:
    """Wall-clock time from a process's first record to its last."""
    moments = [moment for moment in map(_moment, part) if moment]
    return (moments[-1] - moments[0]).total_seconds() if moments else 0.0


def _moment(record: Record) -> datetime | None:
    try:
        return datetime.fromisoformat(record["time"])
    except (KeyError, TypeError, ValueError):
        return None


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} could not be read: {error}")
        return {}
    return value if isinstance(value, dict) else {}
