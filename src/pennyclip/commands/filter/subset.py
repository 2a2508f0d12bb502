"""Choose rows of a dataset: by text, size, repetition, and by what a CLIP thinks of the pairs.

    union of subsets -> intersection -> text and size -> score -> similar pictures -> repetitions
    -> keep/NAME.parquet, keep/NAME.json, keep/NAME.html

A filter writes row numbers and nothing else: shards, splits and other filters stay as they are.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pennyclip.base.atomic import replacing, write_text
from pennyclip.base.errors import RequestError
from pennyclip.commands.filter.rules import Rules, first_of_each
from pennyclip.commands.filter.score import Scorer
from pennyclip.commands.filter.similar import distinct
from pennyclip.data.index import Dataset
from pennyclip.data.order import I64
from pennyclip.evaluation.features import Progress, silent
from pennyclip.reporting.filtered import Drawn, write_filter_page

SPLITS = ("train", "dev", "val", "test")
ANY = Rules()
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Filtered:
    """What a filter left."""

    name: str
    rows: int
    path: str
    page: str
    steps: list[dict[str, Any]]
    """Each rule in words, the rows that it dropped, and those that it left."""
    notes: list[str]
    already_done: bool
    """The same filter had been applied before; nothing was written."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Path of each source of the dataset, its rows at first, and those left."""

    def __str__(self) -> str:
        width = max(len(step["rule"]) for step in self.steps)
        done = " (was already made)" if self.already_done else ""
        lines = [f"{self.path}: {self.rows:,} rows{done}"]
        for step in self.steps:
            dropped = "" if step["dropped"] is None else f"  {step['dropped']:>10,} dropped"
            lines.append(f"  {step['rule']:<{width}}  {step['left']:>10,} left{dropped}")
        if len(self.sources) > 1:
            names = [Path(source["path"]).name[-40:] for source in self.sources]
            width = max(map(len, names))
            lines.append("of each source:")
            lines += [
                f"  {one:<{width}}  {source['left']:>10,} of {source['first']:,} left"
                for one, source in zip(names, self.sources, strict=True)
            ]
        lines += self.notes
        return "\n".join([*lines, f"look at it: {self.page}", f"train on it: --subset {self.name}"])


def filter_dataset(
    data: Path,
    name: str,
    *,
    union: Sequence[str] = ("train",),
    intersect: Sequence[str] = (),
    rules: Rules = ANY,
    score: str | None = None,
    checkpoint: str = "best",
    threshold: float | None = None,
    keep: float | None = None,
    max_similarity: float | None = None,
    max_repeats: int | None = None,
    progress: Progress = silent,
) -> Filtered:
    """Write a subset of rows.

    Args:
        data: the dataset.
        name: of the subset.
        union: start with the rows of any of these subsets.
        intersect: and of them with those that are in each of these.
        rules: about text and size.
        score: a run, or what else `pennyclip.load` takes; its embeddings are computed once for
            the dataset. A row's score is the mean cosine of its picture with its captions.
        checkpoint: of that run.
        threshold: lowest score that stays.
        keep: share of the rows so far, 0 to 1, that stays: the best scored.
        max_similarity: largest cosine between the embeddings of two pictures that both stay; of
            two that are closer, the better scored one does.
        max_repeats: most rows of one group (one picture or caption) that stay, likewise.

    Raises:
        RequestError: the request makes no sense, nothing is left, or the name is taken.
    """
    request: dict[str, Any] = {
        "union": list(union),
        "intersect": list(intersect),
        **asdict(rules),
        "score": score,
        "threshold": threshold,
        "keep": keep,
        "max_similarity": max_similarity,
        "max_repeats": max_repeats,
    }
    _check(name, request)
    dataset = Dataset(data)
    request = {"dataset": dataset.fingerprint, **request}
    within = [(other, dataset.subset(other)) for other in intersect]
    rows = np.unique(np.concatenate([dataset.subset(one) for one in union]))
    steps: list[dict[str, Any]] = []

    def left(rule: str, remaining: I64) -> I64:
        dropped = len(rows) - len(remaining) if steps else None
        steps.append({"rule": rule, "dropped": dropped, "left": len(remaining)})
        if not len(remaining):
            raise RequestError(f"nothing is left after '{rule}': {_told(steps)}. Ask for less.")
        return remaining

    rows = begun = left(f"rows of {' or '.join(union)}", rows)
    made = _made_before(dataset, name)
    _compare(dataset, name, made, request, passing=("score",))  # before hours are spent on scores
    scorer = None
    if score is not None:
        scorer = Scorer.open(dataset, score, checkpoint, progress)
        request["score"] = scorer.fingerprint
    _compare(dataset, name, made, request)
    if made is not None:
        return Filtered(**made["result"] | {"already_done": True})

    for other, inside in within:
        rows = left(f"also in {other}", np.intersect1d(rows, inside))
    for rule, mask in rules.masks(dataset):
        rows = left(rule, rows[mask[rows]])
    drawn = Drawn()
    notes = []
    ranked = rows  # the preferred ones first
    if scorer is not None:
        scores = scorer.rows()
        seen = int(np.isin(rows, scorer.seen()).sum())
        if seen:
            notes.append(
                f"warning: the model was trained on {seen:,} of these {len(rows):,} rows. What it "
                "has learnt by heart scores high, right or wrong: score each half by a model "
                "trained on the other (docs/filter.md)"
            )
        ranked = rows[np.argsort(-scores[rows], kind="stable")]
        before = ranked
        if keep is not None:
            ranked = left(f"the best {keep:.0%} by score", ranked[: round(keep * len(ranked))])
        elif threshold is not None:
            rule = f"a score of at least {threshold:g}"
            ranked = left(rule, ranked[scores[ranked] >= threshold])
        rows = ranked
        drawn = Drawn(before, scores[before], len(ranked))
        if max_similarity is not None:
            mask, twins = distinct(scorer.images, ranked, max_similarity, scorer.device, progress)
            drawn = Drawn(before, scores[before], len(ranked), twins)
            rows = ranked = left(f"no pictures closer than {max_similarity:g}", ranked[mask])
    if max_repeats is not None:
        groups = dataset.rows["group"][ranked].astype(np.int64)
        rows = left(
            f"at most {max_repeats} of one group", ranked[first_of_each(groups, max_repeats)]
        )
    notes += _held_out(dataset, rows)
    sources = by_source(dataset, begun, rows)
    return _write(dataset, name, request, np.sort(rows), steps, notes, drawn, sources)


def by_source(dataset: Dataset, before: I64, after: I64) -> list[dict[str, Any]]:
    """Of each source, its rows before and after the filter. A source's rows are neighbours."""
    return [
        {
            "path": source["path"],
            "first": int(((before >= first) & (before < end)).sum()),
            "left": int(((after >= first) & (after < end)).sum()),
        }
        for source in dataset.meta.get("sources", [])
        for first, end in [source["rows"]]
    ]


SCORED = ("threshold", "keep", "max_similarity")
"""What asks for scores."""

RANGES = {
    "keep": (0, 1),
    "threshold": (-1, 1),
    "max_similarity": (-1, 1),
    **dict.fromkeys(("max_repeats", *asdict(ANY)), (1, np.inf)),
}
"""Least and most."""


def _check(name: str, request: dict[str, Any]) -> None:
    """Raises RequestError where a request makes no sense whatever the dataset."""
    if not NAME.fullmatch(name) or name in SPLITS:
        raise RequestError(
            f"--name {name}: expected letters, digits, '.', '_' or '-', and none of the splits "
            f"{', '.join(SPLITS)}, which prepare writes."
        )
    asked = [key for key in SCORED if request[key] is not None]
    scored = request["score"] is not None
    if asked and not scored:
        raise RequestError(
            f"{' and '.join(asked)} need a model: add --score RUN (or a folder of open_clip's or "
            "transformers')."
        )
    if scored and not asked:
        raise RequestError(
            "--score alone keeps everything: add --keep 0.5 or --threshold X, look at the page, "
            "and choose again under another name; the embeddings are kept."
        )
    if request["threshold"] is not None and request["keep"] is not None:
        raise RequestError("--threshold and --keep both say where to cut: give one of them.")
    for key, (low, high) in RANGES.items():
        if request[key] is not None and not low <= request[key] <= high:
            raise RequestError(f"{key} = {request[key]}: expected a number from {low} to {high}.")
    rules = [key for key in RANGES if request[key] is not None]
    union, intersect = request["union"], request["intersect"]
    if not union or not (rules or intersect or len(union) > 1):
        raise RequestError("this would keep every row: add a rule (see --help).")


def _told(steps: list[dict[str, Any]]) -> str:
    return ", ".join(f"{step['rule']}: {step['left']:,}" for step in steps)


def _made_before(dataset: Dataset, name: str) -> dict[str, Any] | None:
    """The request and result of what has the name already; None where nothing has."""
    record = dataset.path / "keep" / f"{name}.json"
    if not record.with_suffix(".parquet").is_file():
        return None
    empty: dict[str, Any] = {"request": {}}  # somebody's own rows
    return json.loads(record.read_text(encoding="utf-8")) if record.is_file() else empty


def _compare(
    dataset: Dataset,
    name: str,
    made: dict[str, Any] | None,
    request: dict[str, Any],
    passing: Sequence[str] = (),
) -> None:
    """Raises RequestError where the name belongs to another request; some keys may differ."""
    if made is None:
        return
    old = made["request"]
    keys = sorted(key for key in {*old, *request} if old.get(key) != request.get(key))
    if not set(keys) <= set(passing):
        raise RequestError(
            f"{dataset.path} has a subset '{name}' already, of another request (different: "
            f"{', '.join(keys)}). Give another --name, or remove keep/{name}.*."
        )


def _held_out(dataset: Dataset, rows: I64) -> list[str]:
    """A warning where rows of this subset are held out for evaluation."""
    lines = []
    for split in ("dev", "val", "test"):
        if split in dataset.subsets():
            count = int(np.isin(rows, dataset.subset(split)).sum())
            if count:
                lines.append(f"warning: {count:,} of the rows are held out in '{split}'")
    return lines


def _write(
    dataset: Dataset,
    name: str,
    request: dict[str, Any],
    rows: I64,
    steps: list[dict[str, Any]],
    notes: list[str],
    drawn: Drawn,
    sources: list[dict[str, Any]],
) -> Filtered:
    file = dataset.path / "keep" / f"{name}.parquet"
    page = file.with_suffix(".html")
    result = Filtered(name, len(rows), str(file), str(page), steps, notes, False, sources)
    write_filter_page(dataset, name, steps, drawn, page, notes, sources)
    tree = {"request": request, "result": asdict(result)}
    write_text(file.with_suffix(".json"), json.dumps(tree, indent=1) + "\n")
    with replacing(file) as partial:  # the last: a subset that is there is whole
        pq.write_table(pa.table({"row": rows}), partial)
    return result
