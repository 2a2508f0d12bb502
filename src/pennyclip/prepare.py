"""From sources to a dataset: every picture decoded once, and the same bytes every time.

    list the sources -> one task a shard, in processes -> groups and splits -> dataset.json

Whatever interrupts it, the same request goes on with the shards that are missing.
"""

import fcntl
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pennyclip.atomic import locked, partials, remove, replacing, write_text
from pennyclip.data.groups import group_rows, normalised, split_rows
from pennyclip.data.images import MAX_PIXELS
from pennyclip.data.index import ROW, SCHEMA_VERSION
from pennyclip.data.pool import run_tasks
from pennyclip.data.shards import ShardTask, make_shard
from pennyclip.data.sources import Source, open_source
from pennyclip.errors import RequestError, RunError
from pennyclip.telemetry.progress import Counter as ProgressCounter

PATIENCE = 1000  # inputs before "more than half are refused" stops a run. chosen: a shard's worth

DECIDES_BYTES = ("pillow", "simplejpeg", "torch", "numpy", "pyarrow")


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
    """Train rows dropped because the source's val or test holds the same picture or caption."""
    shards: int
    bytes: int
    fingerprint: str

    def __str__(self) -> str:
        refused = sum(self.rejected.values())
        rate = f", {self.seconds:.0f} s" if not self.already_done else ", was already finished"
        lines = [
            f"{self.out}: {self.kept:,} of {self.inputs:,} inputs kept{rate}",
            f"  captions  {self.captions:,} ({self.captions / self.kept:.2f} an image)",
            f"  splits    {', '.join(f'{name} {n:,}' for name, n in self.splits.items())}",
            f"  groups    {self.groups:,}, the largest of {self.largest_group:,} rows",
            f"  on disk   {self.shards:,} shards, {self.bytes / 1e6:,.1f} MB",
        ]
        if self.crossing:
            lines.append(f"  crossing  {self.crossing:,} train rows dropped: also in val or test")
        if refused:
            lines.append(f"  refused   {refused:,}, listed in {self.out}/rejects.jsonl")
            lines += [f"            {count:,} {why}" for why, count in self.rejected.items()]
        return "\n".join(lines)


def prepare(
    sources: Sequence[str | os.PathLike[str]] | str,
    out: str | os.PathLike[str],
    *,
    shard_size: int = 1000,
    workers: int | None = None,
    short_side: int = 256,
    quality: int = 90,
    val_share: float = 0.05,
    dev_share: float = 0.05,
    image_key: str | None = None,
    caption_key: str | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Summary:
    """Turn sources into a dataset folder.

    The bytes written depend on the sources and the request, not on the workers. Run again after
    an interruption it goes on; run again when finished it says so and changes nothing.

    Args:
        sources: what `pennyclip.data.sources.open_source` recognises, in this order.
        out: the dataset's folder.
        shard_size: inputs a shard; what is refused is missing from its shard. Chosen: 25 MB.
        workers: processes; None: one for each core that this process may use.
        short_side: pixels to which a larger picture's shorter side is brought.
        quality: of the JPEGs that are encoded.
        val_share: of the rows, held out for reports where no source brings a val split.
        dev_share: of the train rows left, held out to choose by.
        image_key: a table's column with the image paths, where its name is unusual.
        caption_key: a table's column (a tar's .json field) with the captions, likewise.
        seed: of the choice of val and dev.
        quiet: show no progress.

    Raises:
        RequestError: a source or argument is wrong, or `out` holds something else.
        RunError: nearly everything was refused, a worker was killed, or the disk is full.
    """
    began = time.monotonic()
    if isinstance(sources, str):
        sources = [sources]
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    _check_arguments(workers, shard_size, short_side, quality, val_share, dev_share)
    out = Path(out)
    opened = [open_source(path, image_key=image_key, caption_key=caption_key) for path in sources]
    _check_sources(opened, out)
    request = {
        "sources": [
            {
                "path": str(source.path.resolve()),
                "kind": source.kind,
                "inputs": len(source),
                "fingerprint": source.fingerprint,
            }
            for source in opened
        ],
        "shard_size": shard_size,
        "short_side": short_side,
        "quality": quality,
        "val_share": val_share,
        "dev_share": dev_share,
        "image_key": image_key,
        "caption_key": caption_key,
        "seed": seed,
    }
    try:
        with _claimed(out, request):
            already_done = (out / "dataset.json").is_file()
            if not already_done:
                items = [(n, item) for n, source in enumerate(opened) for item in source.items]
                tasks = [
                    ShardTask(
                        out=out,
                        number=first // shard_size,
                        first=first,
                        items=items[first : first + shard_size],
                        short_side=short_side,
                        quality=quality,
                    )
                    for first in range(0, len(items), shard_size)
                ]
                _finish(out, request, tasks, _make_shards(tasks, workers, quiet))
            return _summary(out, seconds=time.monotonic() - began, already_done=already_done)
    except OSError as error:
        raise RunError(
            f"Writing {out} failed: {error}. What is finished is kept: run it again when the cause "
            "is gone."
        ) from error


def _check_arguments(
    workers: int, shard_size: int, short_side: int, quality: int, val_share: float, dev_share: float
) -> None:
    for name, value, low, high in (
        ("workers", workers, 1, 4096),
        ("shard_size", shard_size, 1, 1_000_000),
        ("short_side", short_side, 1, 65_535),
        ("quality", quality, 1, 100),
        ("val_share", val_share, 0, 0.9),
        ("dev_share", dev_share, 0, 0.9),
    ):
        if not low <= value <= high:
            raise RequestError(f"{name} = {value}: expected a number from {low} to {high}.")


def _check_sources(opened: list[Source], out: Path) -> None:
    if not opened:
        raise RequestError("prepare needs at least one source: a folder, a table, or tars.")
    for source in opened:
        if not len(source):
            raise RequestError(f"{source.path} ({source.kind}) holds no pair at all.")
        if source.kind == "folder" and out.resolve().is_relative_to(source.path.resolve()):
            raise RequestError(
                f"The dataset {out} would lie inside its own source {source.path}. "
                "Give a folder elsewhere with --out."
            )


@contextmanager
def _claimed(out: Path, request: dict[str, Any]) -> Iterator[None]:
    """Make sure that the folder is this request's, and that nobody else works in it."""
    if out.exists() and not out.is_dir():
        raise RequestError(f"{out} is a file; the dataset needs a folder of its own.")
    record = out / "index" / "request.json"
    if out.is_dir() and not record.is_file():
        others = sorted(e.name for e in out.iterdir() if e.name not in ("shards", "index"))
        if others:
            raise RequestError(
                f"{out} holds something else ({', '.join(others[:3])}). "
                "Give an empty or new folder with --out."
            )
    for folder in ("shards", "index"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    try:
        with locked(out, fcntl.LOCK_EX | fcntl.LOCK_NB):
            with locked(out / "shards", fcntl.LOCK_EX):
                pass  # workers of a killed run have gone
            for folder in (".", "shards", "index", "keep"):
                for partial in partials(out / folder):
                    remove(partial)
            if record.is_file():
                _compare(out, json.loads(record.read_text(encoding="utf-8")), request)
            else:
                write_text(record, json.dumps(request, ensure_ascii=False, indent=1) + "\n")
            yield
    except BlockingIOError:
        raise RequestError(f"Another prepare is working in {out}. Wait for it.") from None


def _compare(out: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    old, new = _flat(old), _flat(new)
    differing = [
        f"{name} was {old.get(name)!r} and is now {new.get(name)!r}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    if differing:
        raise RequestError(
            f"{out} belongs to a different request: {'; '.join(differing)}. "
            "Give another folder with --out, or remove this one."
        )


def _flat(request: dict[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in request.items() if name != "sources"}
    for number, source in enumerate(request["sources"], start=1):
        flat |= {f"source {number}'s {name}": value for name, value in source.items()}
    return flat


def _make_shards(tasks: list[ShardTask], workers: int, quiet: bool) -> list[dict[str, Any]]:
    """Carry out the tasks that are not done, and return every shard's manifest."""
    done = {task.number: found for task in tasks if (found := _manifest_of(task)) is not None}
    todo = [task for task in tasks if task.number not in done]
    first = -(-PATIENCE // len(tasks[0].items))  # shards that show whether the sources are sound
    total = sum(len(task.items) for task in tasks)
    trouble = None
    with (
        ProgressCounter("prepare", total, quiet) as progress,
        closing(run_tasks(make_shard, todo, workers, preload=["torch"])) as events,
    ):
        progress.skip(sum(found["inputs"] for found in done.values()))
        for kind, number, value in events:
            if kind == "progress":
                refused = sum(len(found["rejects"]) for found in done.values())
                progress.add(value, f", {refused:,} refused" if refused else "")
                continue
            done[todo[number].number] = value
            if todo[number].number < first and all(n in done for n in range(first)):
                trouble = _systematic([done[n] for n in range(first)])
                if trouble is not None:
                    break
    if trouble is None:
        trouble = _systematic([done[task.number] for task in tasks])
    if trouble is not None:
        out = tasks[0].out
        for folder in ("shards", "index"):
            remove(out / folder)
        raise RunError(f"{trouble} Nothing is left in {out}: correct the cause and run it again.")
    return [done[task.number] for task in tasks]


def _manifest_of(task: ShardTask) -> dict[str, Any] | None:
    """A finished shard's manifest, or None where there is something to do."""
    tar = task.out / "shards" / f"{task.name}.tar"
    if not task.manifest.is_file() or not tar.is_file():
        return None
    manifest: dict[str, Any] = json.loads(task.manifest.read_text(encoding="utf-8"))
    return manifest if tar.stat().st_size == manifest["bytes"] else None


def _systematic(manifests: list[dict[str, Any]]) -> str | None:
    """What is wrong with the sources as a whole, if most is refused; better than a long list."""
    inputs = sum(found["inputs"] for found in manifests)
    rejects = [reject for found in manifests for reject in found["rejects"]]
    if len(rejects) < inputs and (inputs < PATIENCE or len(rejects) <= inputs / 2):
        return None
    why = rejects[0]
    return (
        f"{len(rejects):,} of {inputs:,} inputs were refused, so something is wrong with all of "
        f"them. The first: {why['origin']}, {why['key']}: {why['reason']}."
    )


def _finish(
    out: Path, request: dict[str, Any], tasks: list[ShardTask], manifests: list[dict[str, Any]]
) -> None:
    """Groups, splits and the loader's table over all shards; dataset.json makes it a dataset."""
    tables = [pq.read_table(out / "index" / f"{task.name}.parquet") for task in tasks]
    table = pa.concat_tables(tables)
    hashes = table["pixel_hash"].to_pylist()
    groups = group_rows(
        [
            b"pixels" + pixels,
            *(_key("caption", normalised(caption)) for caption in captions),
            *([_key(f"group {source}", group)] if group is not None else []),
        ]
        for pixels, captions, source, group in zip(
            hashes, *(table[n].to_pylist() for n in ("captions", "source", "group")), strict=True
        )
    )
    splits, crossing = split_rows(
        groups,
        table["split"].to_pylist(),
        hashes,
        val_share=request["val_share"],
        dev_share=request["dev_share"],
        seed=request["seed"],
    )
    rows = np.empty(len(table), ROW)
    rows["shard"] = np.repeat(np.arange(len(tables)), [len(one) for one in tables])
    rows["captions"] = [len(captions) for captions in table["captions"].to_pylist()]
    rows["group"] = groups
    for name in ("image_offset", "image_length", "text_offset", "text_length"):
        rows[name] = table[name].to_numpy()
    with replacing(out / "index" / "rows.npy") as partial, partial.open("wb") as file:
        np.save(file, rows)
    for name, ids in splits.items():
        with replacing(out / "keep" / f"{name}.parquet") as partial:
            pq.write_table(pa.table({"row": ids}), partial)
    rejects = [reject for found in manifests for reject in found["rejects"]]
    lines = [json.dumps(reject, ensure_ascii=False) + "\n" for reject in rejects]
    write_text(out / "rejects.jsonl", "".join(lines))

    fingerprint = blake2b(rows.tobytes(), digest_size=16)
    for found in manifests:
        fingerprint.update(bytes.fromhex(found["blake2b"]))
    reasons = Counter(reject["reason"].partition(":")[0] for reject in rejects)
    meta = {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": fingerprint.hexdigest(),
        "request": request,
        "preprocess": {
            "short_side": request["short_side"],
            "quality": request["quality"],
            "resize": "bicubic, antialiased, never enlarged",
            "max_pixels": MAX_PIXELS,
        },
        "versions": {name: version(name) for name in DECIDES_BYTES},
        "shards": [
            {
                "path": f"shards/{task.name}.tar",
                **{name: found[name] for name in ("rows", "bytes", "blake2b")},
            }
            for task, found in zip(tasks, manifests, strict=True)
        ],
        "counts": {
            "inputs": sum(found["inputs"] for found in manifests),
            "kept": len(rows),
            "rejected": dict(reasons.most_common()),
            "captions": int(rows["captions"].sum()),
            "groups": len(np.unique(groups)),
            "largest_group": int(np.unique(groups, return_counts=True)[1].max()),
            "crossing": crossing,
        },
        "splits": {name: len(ids) for name, ids in sorted(splits.items())},
    }
    write_text(out / "dataset.json", json.dumps(meta, ensure_ascii=False, indent=1) + "\n")


def _key(kind: str, text: str) -> bytes:
    return blake2b(f"{kind}\0{text}".encode(), digest_size=16).digest()


def _summary(out: Path, *, seconds: float, already_done: bool) -> Summary:
    meta = json.loads((out / "dataset.json").read_text(encoding="utf-8"))
    return Summary(
        out=str(out),
        already_done=already_done,
        seconds=seconds,
        splits=meta["splits"],
        shards=len(meta["shards"]),
        bytes=sum(shard["bytes"] for shard in meta["shards"]),
        fingerprint=meta["fingerprint"],
        **meta["counts"],
    )
