"""What a dataset holds, and what was refused on the way."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

FEW = 100
"""Rows below which a split's scores say little. Chosen: the standard error of a recall of 50 % is
50 points by the root of their number, so 5 points here."""


@dataclass(frozen=True)
class Summary:
    """What a dataset holds, and what was refused on the way."""

    out: str
    already_done: bool
    """The same request had been finished before; nothing was written."""
    seconds: float
    inputs: int
    kept: int
    rejected: dict[str, int]
    """Refused inputs by reason; each stands in rejects.jsonl."""
    captions: int
    groups: int
    """Sets of rows that show or say the same; a row of its own counts as one."""
    largest_group: int
    splits: dict[str, int]
    crossing: int
    """Rows in no split, because another split has the same picture or caption, or is linked with
    theirs by way of other rows: crossing.jsonl."""
    shards: int
    bytes: int
    fingerprint: str
    equal_pictures: int = 0
    """Rows whose picture is the very same as an earlier row's, once in its stored size."""
    near_pictures: int = 0
    """Rows whose picture is nearly the same as another's; they are in one group too."""
    raw_bytes: int = 0
    """Of the plain pixels kept beside the JPEGs."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Path, kind, inputs and rows (the first, and the one after the last) of each."""
    added: dict[str, int] = field(default_factory=dict)
    """Of an append: the rows that it added to each split, and to none under "left out"."""
    stale_filters: list[str] = field(default_factory=list)
    """Filters made before sources were appended: none of the new rows is in them."""

    def __str__(self) -> str:
        refused = sum(self.rejected.values())
        rate = f", {self.seconds:.0f} s" if not self.already_done else ", was already finished"
        lines = [
            f"{self.out}: {self.kept:,} of {self.inputs:,} inputs kept{rate}",
            f"  captions  {self.captions:,} ({self.captions / self.kept:.2f} an image)",
            f"  splits    {', '.join(f'{name} {n:,}' for name, n in self.splits.items())}",
            *self._added(),
            f"  groups    {self.groups:,}, the largest of {self.largest_group:,} rows",
            f"  repeats   {self.equal_pictures:,} pictures equal, {self.near_pictures:,} nearly",
            f"  on disk   {self.shards:,} shards, {self.bytes / 1e6:,.1f} MB"
            + (f", and {self.raw_bytes / 1e6:,.1f} MB of raw pixels" if self.raw_bytes else ""),
        ]
        if self.crossing:
            lines.append(
                f"  crossing  {self.crossing:,} rows left out: another split has their picture or "
                f"caption, or is linked with it by way of other rows: {self.out}/crossing.jsonl"
            )
        lines += [
            f"  warning   {name} has {count} rows: a recall of 50 % on them is uncertain by "
            f"{50 / count**0.5:.0f} points"
            for name, count in self.splits.items()
            if name != "train" and count < FEW
        ]
        if self.stale_filters:
            names = ", ".join(self.stale_filters)
            lines.append(f"  warning   made before the last append, without its rows: {names}")
        if not any(count for name, count in self.splits.items() if name != "train"):
            lines.append(
                "  warning   nothing is held out: too few pairs for a dev or val split, so nothing "
                "will say how good a model is"
            )
        if "train" not in self.splits:
            lines.append("  warning   no row is left to train on: the sources bring other splits")
        if refused:
            lines.append(f"  refused   {refused:,}, listed in {self.out}/rejects.jsonl")
            lines += [f"            {count:,} {why}" for why, count in self.rejected.items()]
        return "\n".join([*lines, *self._table()])

    def _added(self) -> list[str]:
        """What an append brought, and what it means for runs."""
        if not self.added:
            return []
        return [
            f"  added     {', '.join(f'{name} {n:,}' for name, n in self.added.items())}",
            "  runs      those begun before this append cannot be resumed on the larger dataset",
        ]

    def _table(self) -> list[str]:
        """One line a source."""
        rows = [("source", "kind", "inputs", "kept", "refused")]
        for one in self.sources:
            kept = one["rows"][1] - one["rows"][0]
            numbers = (f"{n:,}" for n in (one["inputs"], kept, one["inputs"] - kept))
            rows.append((Path(one["path"]).name[-40:], one["kind"], *numbers))
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            f"  {name:<{wide[0]}}  {kind:<{wide[1]}}"
            + "".join(f"  {n:>{w}}" for n, w in zip(numbers, wide[2:], strict=True))
            for name, kind, *numbers in rows
        ]


def summarize(
    out: Path, *, seconds: float, already_done: bool, appended: int | None = None
) -> Summary:
    """The summary of a finished dataset.

    Args:
        appended: the batch of sources whose rows are counted as added; None: of none.
    """
    meta = json.loads((out / "dataset.json").read_text(encoding="utf-8"))
    return Summary(
        out=str(out),
        already_done=already_done,
        seconds=seconds,
        splits=meta["splits"],
        shards=len(meta["shards"]),
        bytes=sum(shard["bytes"] for shard in meta["shards"]),
        raw_bytes=sum(shard.get("raw_bytes", 0) for shard in meta["shards"]),
        sources=meta.get("sources", []),
        added={} if appended is None else _added(out, meta, appended),
        stale_filters=_stale(out, meta["fingerprint"]),
        fingerprint=meta["fingerprint"],
        **meta["counts"],
    )


def _added(out: Path, meta: dict[str, Any], batch: int) -> dict[str, int]:
    """How many rows a batch has in each split, and how many in none."""
    asked = zip(meta["request"]["sources"], meta["sources"], strict=True)
    rows = [source["rows"] for request, source in asked if request["batch"] == batch]
    first, end = rows[0][0], rows[-1][1]
    counts = {}
    for name in meta["splits"]:
        ids = pq.read_table(out / "keep" / f"{name}.parquet")["row"].to_numpy()
        counts[name] = int(((ids >= first) & (ids < end)).sum())
    return counts | {"left out": end - first - sum(counts.values())}


def _stale(out: Path, fingerprint: str) -> list[str]:
    """Filters of the dataset as it was before."""
    names = []
    for record in sorted((out / "keep").glob("*.json")):
        if json.loads(record.read_text(encoding="utf-8"))["request"]["dataset"] != fingerprint:
            names.append(record.stem)
    return names
