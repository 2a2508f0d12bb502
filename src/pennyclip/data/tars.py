"""Webdataset tars, read by position: the headers once, each member when it is wanted."""

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pennyclip.data.pairs import (
    IMAGE_SUFFIXES,
    Item,
    Pair,
    Reject,
    Source,
    caption_lines,
    json_captions,
    listing_fingerprint,
    load_json,
    pair_or_reject,
    shown,
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
                image, text = _read_span(file, self.image), _read_span(file, self.text)
        except OSError as error:
            return Reject(self.key, origin, f"unreadable: {error.strerror}")
        try:
            if self.caption_key is None:
                captions: Sequence[str | None] = caption_lines(text)
            else:
                captions = json_captions(load_json(text), self.caption_key)
        except ValueError as error:
            return Reject(self.key, origin, f"bad caption: {error}")
        return pair_or_reject(self.key, origin, image, captions)


def _read_span(file: BinaryIO, span: Span) -> bytes:
    file.seek(span[0])
    return file.read(span[1])


def open_tars(path: Path, tars: list[Path], caption_key: str | None) -> Source:
    """List the pairs in tars. A tar that breaks off costs what stands behind the break."""
    items: list[Item] = []
    for tar in tars:
        try:
            for key, run in _runs(tar):
                items += _items(tar, key, run, caption_key)
        except (tarfile.TarError, OSError) as error:
            items.append(Reject(shown(tar.name), shown(tar.name), f"damaged tar: {error}"))
    return Source("webdataset", path, items, listing_fingerprint(path, tars))


def _runs(tar: Path) -> Iterator[tuple[str, dict[str, Span]]]:
    """Adjacent members of one key: by webdataset's rule, the name up to its first dot."""
    key, run = "", dict[str, Span]()
    try:
        with tarfile.open(tar, "r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                folder, slash, name = member.name.rpartition("/")
                found = folder + slash + name.partition(".")[0]
                if run and (found != key or member.name in run):  # a repeated name: a new sample
                    yield key, run
                    run = {}
                key = found
                run[member.name] = (member.offset_data, member.size)
    finally:
        if run:
            yield key, run


def _items(tar: Path, sample: str, run: dict[str, Span], caption_key: str | None) -> Iterator[Item]:
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
    for name in images:
        stem = name[: -len(Path(name).suffix)]
        text, record = run.get(f"{stem}.txt"), run.get(f"{stem}.json")
        if record is not None and (caption_key is not None or text is None):
            yield TarItem(tar, shown(name), run[name], record, caption_key or "")
        elif text is not None:
            yield TarItem(tar, shown(name), run[name], text, None)
        elif stem == sample or not has_main:
            yield Reject(shown(name), origin, f"no caption: no {shown(stem)}.txt or .json")
