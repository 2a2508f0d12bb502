"""Whether a folder belongs to a request, and what is left to do in it.

index/request.json holds everything that a folder was asked for: how its pictures are made, and
its sources in batches. Batch 0 made the dataset, each later one was appended. While one is being
appended, index/append.json holds the request as it will be.
"""

import fcntl
import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pennyclip.base.atomic import locked, partials, remove, write_text
from pennyclip.base.errors import RequestError
from pennyclip.data.index import Dataset
from pennyclip.data.prepare.request import Request
from pennyclip.data.prepare.work import Refused
from pennyclip.data.shards import Form, ShardTask
from pennyclip.data.sources import Source


@dataclass(frozen=True)
class Claim:
    """A folder that is this request's, and which part of it."""

    out: Path
    request: Request
    """All that the folder was asked for."""
    batch: int
    """0: what made the dataset; later ones were appended."""
    done: bool

    @property
    def roots(self) -> list[Path]:
        """Where shards go, in turn."""
        return [self.out, *map(Path, self.request["roots"])]

    @property
    def shards(self) -> int:
        """Of all batches."""
        return sum(_shard_counts(self.request))

    @property
    def first_shard(self) -> int:
        return sum(_shard_counts(self.request)[: self.batch])

    @property
    def first_input(self) -> int:
        return sum(_inputs(self.request)[: self.batch])

    @property
    def first_source(self) -> int:
        return sum(source["batch"] < self.batch for source in self.request["sources"])


def make_tasks(claim: Claim, opened: Sequence[Source], form: Form) -> list[ShardTask]:
    """One task a shard: a fixed slice of the batch's inputs."""
    size, roots = claim.request["shard_size"], claim.roots
    items = [
        (number, item)
        for number, source in enumerate(opened, start=claim.first_source)
        for item in source.items
    ]
    return [
        ShardTask(
            out=claim.out,
            root=roots[number % len(roots)],
            number=number,
            first=claim.first_input + first,
            items=items[first : first + size],
            form=form,
        )
        for number, first in enumerate(range(0, len(items), size), start=claim.first_shard)
    ]


def _shard_counts(request: Request) -> list[int]:
    """Shards of each batch."""
    return [-(-inputs // request["shard_size"]) for inputs in _inputs(request)]


def _inputs(request: Request) -> list[int]:
    batches = max(source["batch"] for source in request["sources"]) + 1
    return [sum(s["inputs"] for s in _batch(request, number)) for number in range(batches)]


def _batch(request: Request, number: int) -> list[Request]:
    return [source for source in request["sources"] if source["batch"] == number]


@contextmanager
def claimed(out: Path, settings: Request, sources: list[Request], append: bool) -> Iterator[Claim]:
    """Make sure that the folder is this request's, and that nobody else works in it.

    Raises:
        RequestError: it is not, or somebody does.
    """
    if out.exists() and not out.is_dir():
        raise RequestError(f"{out} is a file; the dataset needs a folder of its own.")
    record = out / "index" / "request.json"
    if append and not (out / "dataset.json").is_file():
        raise RequestError(
            f"{out} is no finished dataset, so nothing can be appended to it. Prepare it first, "
            "without --append."
        )
    if (out / "dataset.json").is_file():
        Dataset(out)  # which says if a shard has gone since, or a disk
    if not record.is_file():
        _check_free(out, "--out")
        for root in settings["roots"]:
            _check_free(Path(root), "--roots")
    for folder in _folders(out, settings):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(out, fcntl.LOCK_EX | fcntl.LOCK_NB):
            with locked(out / "shards", fcntl.LOCK_EX):
                pass  # workers of a killed run have gone
            for folder in [out, out / "keep", *_folders(out, settings)]:
                for partial in partials(folder):
                    remove(partial)
            claim = _claim(out, settings, sources, append)
            _begin(claim)
            try:
                yield claim
            except Refused:
                remove(out / "index" if claim.batch == 0 else _pending(out))
                raise
            _write(record, claim.request)
            if _read(_pending(out)) == claim.request:
                remove(_pending(out))
    except BlockingIOError:
        raise RequestError(f"Another prepare is working in {out}. Wait for it.") from None


def _check_free(folder: Path, flag: str) -> None:
    """Nothing stands in it, but for empty folders of ours that a killed run left."""
    ours = ("shards", "raw", "index")
    if folder.is_dir():
        files = {entry for entry in folder.rglob("*") if not entry.is_dir()}
        others = {entry.name for entry in folder.iterdir() if entry.name not in ours}
        others |= {file.name for file in files if not file.name.endswith(".tmp")}
        if others:
            raise RequestError(
                f"{folder} holds something else ({', '.join(sorted(others)[:3])}). "
                f"Give an empty or new folder with {flag}."
            )
    elif folder.exists():
        raise RequestError(f"{folder} is a file; give a folder with {flag}.")


def _folders(out: Path, settings: Request) -> list[Path]:
    kinds = ["shards"] if settings["raw"] is None else ["shards", "raw"]
    roots = [out, *map(Path, settings["roots"])]
    return [out / "index", *(root / kind for root in roots for kind in kinds)]


def _claim(out: Path, settings: Request, sources: list[Request], append: bool) -> Claim:
    """What this request is to the folder: the whole of it, or a batch that was or is appended."""
    asked, meta = _read(out / "index" / "request.json"), _read(out / "dataset.json")
    first = settings | {"sources": _numbered(sources, 0)}
    if asked is None:
        return Claim(out, first, 0, done=False)
    if meta is not None:
        # Ahead by a batch, where an append was killed at its very end; people correct the roots.
        asked = meta["request"] | {"roots": meta.get("roots", ["."])[1:]}
    if not append:
        _compare(out, asked | {"sources": _batch(asked, 0)}, first)
        return Claim(out, asked, 0, done=meta is not None)
    _compare_settings(out, asked, settings)
    batches = len(_inputs(asked))
    for batch in range(batches):
        if _batch(asked, batch) == _numbered(sources, batch):
            return Claim(out, asked, batch, done=True)
    for source in sources:
        if source["path"] in [old["path"] for old in asked["sources"]]:
            raise RequestError(
                f"{source['path']} is in {out} already, and what is in it would be there twice. "
                "Give only what is new, as a source of its own; or prepare a new dataset of all."
            )
    whole = asked | {"sources": asked["sources"] + _numbered(sources, batches)}
    pending = _read(_pending(out))
    if pending not in (None, whole, asked):
        waiting = ", ".join(source["path"] for source in _batch(pending, batches))
        raise RequestError(
            f"{out}: an --append of {waiting} was interrupted. Run that again first, or give it up "
            f"by removing {_pending(out)}."
        )
    return Claim(out, whole, batches, done=False)


def _begin(claim: Claim) -> None:
    """Note down what is asked for, before anything is made of it."""
    if claim.done or _read(_pending(claim.out)) == claim.request:
        return
    if claim.batch == 0:
        _write(claim.out / "index" / "request.json", claim.request)
        return
    for manifest in (claim.out / "index").glob("*.json"):  # of an append that was given up
        if manifest.stem.isdigit() and int(manifest.stem) >= claim.first_shard:
            remove(manifest)
    _write(_pending(claim.out), claim.request)


def _pending(out: Path) -> Path:
    return out / "index" / "append.json"


def _numbered(sources: list[Request], batch: int) -> list[Request]:
    return [source | {"batch": batch} for source in sources]


def _write(record: Path, request: Request) -> None:
    if _read(record) != request:
        write_text(record, json.dumps(request, ensure_ascii=False, indent=1) + "\n")


def _compare(out: Path, old: Request, new: Request) -> None:
    was, now = _flat(old), _flat(new)
    differing = [
        f"{name} was {was.get(name)!r} and is now {now.get(name)!r}"
        for name in {**was, **now}
        if was.get(name) != now.get(name) and not name.endswith("'s fingerprint")
    ]
    for before, after in zip(old["sources"], new["sources"], strict=False):
        if before["path"] == after["path"] and before["fingerprint"] != after["fingerprint"]:
            differing.append(f"{after['path']} has changed: a table, or its files")
    if differing:
        raise RequestError(
            f"{out} belongs to a different request: {'; '.join(differing)}. "
            "Give another folder with --out, or remove this one."
        )


def _compare_settings(out: Path, old: Request, new: Request) -> None:
    """Of an append, which must be made as the rows that are there."""
    differing = [name for name in new if old.get(name) != new[name]]
    if not differing:
        return
    told = "; ".join(f"{name} was {old.get(name)!r} and is now {new[name]!r}" for name in differing)
    unset = [name for name in differing if old.get(name) in (None, [])]
    repeat = [_option(name, old[name]) for name in differing if name not in unset]
    repeat += [f"without {_option(name, [])}" for name in unset]
    raise RequestError(
        f"{out} was made with other options: {told}. Repeat those of the first time: "
        f"{' '.join(repeat)}. To make its pictures otherwise, prepare all sources into another "
        "--out."
    )


def _option(name: str, value: Any) -> str:
    """A setting as it is given on the command line."""
    values = value if isinstance(value, list) else [value]
    return shlex.join([f"--{name.replace('_', '-')}", *map(str, values)])


def _flat(request: Request) -> Request:
    flat = {name: value for name, value in request.items() if name != "sources"}
    for number, source in enumerate(request["sources"], start=1):
        flat |= {f"source {number}'s {name}": value for name, value in source.items()}
    return flat


def _read(file: Path) -> Request | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
