"""Webdataset tars, read by position: the headers once, each member when it is wanted.

Beside each of its tars img2dataset leaves a parquet table that also has what it failed to fetch.
"""

import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pennyclip.base.errors import RequestError
from pennyclip.data.sources.files import (
    IMAGE_SUFFIXES,
    MAX_IMAGE,
    MAX_TEXT,
    check_size,
    listing_fingerprint,
    shown,
)
from pennyclip.data.sources.folders import open_folder
from pennyclip.data.sources.pairs import (
    Item,
    Options,
    Pair,
    Reader,
    Reject,
    Source,
    caption_lines,
    json_captions,
    load_json,
    pair_or_reject,
)

Span = tuple[int, int]  # offset and length in bytes


@dataclass(frozen=True)
class TarItem:
    tar: Path
    key: str
    image: Span
    text: Span
    caption_key: str | None
    """None: `text` is lines; otherwise it is JSON, and this its field ("" for the usual ones)."""

    def read(self) -> Pair | Reject:
        origin = shown(self.tar.name)
        try:
            with self.tar.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                image = _read_span(file, self.image, size, MAX_IMAGE)
                text = _read_span(file, self.text, size, MAX_TEXT)
        except OSError as error:
            return Reject(self.key, origin, f"unreadable: {error.strerror}")
        except ValueError as error:
            return Reject(self.key, origin, f"unreadable: {error}")
        try:
            if self.caption_key is None:
                captions: Sequence[str | None] = caption_lines(text)
            else:
                captions = json_captions(load_json(text), self.caption_key)
        except ValueError as error:
            return Reject(self.key, origin, f"bad caption: {error}")
        return pair_or_reject(self.key, origin, image, captions)


def _read_span(file: BinaryIO, span: Span, size: int, most: int) -> bytes:
    """Raises ValueError where a header claims more than there is, or than anybody wants."""
    offset, length = span
    check_size(length, most)
    if offset + length > size:
        raise ValueError("it ends behind the end of its tar")
    file.seek(offset)
    return file.read(length)


def open_tars(path: Path, options: Options) -> Source | None:
    """The pairs in a tar, or in all tars of a folder.

    A tar that breaks off costs what stands behind the break.

    Raises:
        RequestError: the folder also holds pictures with text files.
    """
    among = path.iterdir() if path.is_dir() else [path]
    tars = sorted(file for file in among if file.suffix.lower() == ".tar")
    if not tars:
        return None
    if open_folder(path, options) is not None:
        raise RequestError(
            f"{path} holds both webdataset tars ({tars[0].name}) and pictures with text files. "
            "Give the tars by name, or move one of the two elsewhere."
        )
    items: list[Item] = []
    files: list[Path] = []
    kind = "webdataset"
    for tar in tars:
        files.append(tar)
        found = len(items)
        try:
            for key, run in _runs(tar):
                items += _items(tar, key, run, options.caption_key)
        except (tarfile.TarError, OSError, ValueError) as error:  # ValueError: sizes beyond 64 bits
            reason = f"damaged tar: {error}"
            if len(items) == found and (kind_of := _compressed(tar)) is not None:
                reason = f"compressed tar: unpack it with {kind_of}, so that it is read by position"
            items.append(Reject(shown(tar.name), shown(tar.name), reason))
        log = tar.with_suffix(".parquet")
        keys = {Path(item.key).stem for item in items[found:] if isinstance(item, TarItem)}
        failed = _failed(log, keys) if log.is_file() else None
        if failed is not None:
            items += failed
            files.append(log)
            kind = "img2dataset"
    return Source(kind, path, items, listing_fingerprint(path, files))


COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"(\xb5/\xfd": "unzstd",
}
"""How compressed files begin, and what unpacks them."""


def _compressed(tar: Path) -> str | None:
    try:
        with tar.open("rb") as file:
            start = file.read(8)
    except OSError:
        return None
    return next((tool for magic, tool in COMPRESSED.items() if start.startswith(magic)), None)


def _failed(log: Path, keys: set[str]) -> list[Reject] | None:
    """What img2dataset's table of a tar has and the tar has not, or None for another table.

    Raises:
        RequestError: the table cannot be read.
    """
    origin = shown(log.name)
    try:
        with pq.ParquetFile(log) as file:
            if not {"key", "status"} <= set(file.schema_arrow.names):
                return None
            columns = [
                n for n in ("key", "status", "error_message") if n in file.schema_arrow.names
            ]
            rows = file.read(columns).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise RequestError(
            f"{log} cannot be read: {error}. It lies beside a tar of the same name: fetch both "
            "again, or move it away."
        ) from None
    rejects = []
    for number, row in enumerate(rows):
        key, where = str(row["key"]), f"{origin}:{number}"
        if row["status"] != "success":
            why = row.get("error_message") or row["status"]
            rejects.append(Reject(key, where, f"not fetched: {why}"))
        elif key not in keys:
            rejects.append(Reject(key, where, "not in the tar, although it was fetched"))
    return rejects


def _runs(tar: Path) -> Iterator[tuple[str, dict[str, Span | None]]]:
    """Adjacent members of one key: by webdataset's rule, the name up to its first dot. Links have
    no place."""
    key, run = "", dict[str, Span | None]()
    try:
        with tarfile.open(tar, "r:") as archive:
            for member in archive:
                if not (member.isfile() or member.issym() or member.islnk()):
                    continue
                folder, slash, name = member.name.rpartition("/")
                found = folder + slash + name.partition(".")[0]
                if run and (found != key or member.name in run):  # a repeated name: a new sample
                    yield key, run
                    run = {}
                key = found
                run[member.name] = (member.offset_data, member.size) if member.isfile() else None
    finally:
        if run:
            yield key, run


def _items(
    tar: Path, sample: str, run: dict[str, Span | None], caption_key: str | None
) -> Iterator[Item]:
    """The pairs among the members of one key.

    A picture's caption is the member named like it but for the last suffix. So names with dots,
    which webdataset throws together under one key, keep their own captions; and beside a picture
    `key.jpg` with its caption, one without (a mask, `key.seg.png`) is a field of the sample.
    """
    origin = shown(tar.name)
    images = [name for name in run if Path(name).suffix.lower() in IMAGE_SUFFIXES]
    if not images:
        yield Reject(shown(next(iter(run))), origin, "no picture: none of the same name")
    has_main = any(Path(name).stem == Path(sample).name for name in images)
    fields = {_lower_suffix(name): span for name, span in run.items()}
    for name in images:
        stem = name[: -len(Path(name).suffix)]
        text, record = fields.get(f"{stem}.txt"), fields.get(f"{stem}.json")
        image = run[name]
        if image is not None and record is not None and (caption_key is not None or text is None):
            yield TarItem(tar, shown(name), image, record, caption_key or "")
        elif image is not None and text is not None:
            yield TarItem(tar, shown(name), image, text, None)
        elif stem == sample or not has_main:
            why = f"no caption: no {shown(stem)}.txt or .json"
            yield Reject(shown(name), origin, why if image is not None else "a link: no picture")


def _lower_suffix(name: str) -> str:
    suffix = Path(name).suffix
    return name[: len(name) - len(suffix)] + suffix.lower()


TARS = Reader(
    "a webdataset .tar (not compressed) or a folder of them, captions in .txt or .json members; "
    "img2dataset's too",
    ("caption_key",),
    open_tars,
)
