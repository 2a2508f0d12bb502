"""What a source gives: pairs, or the reason why an input is none; and what reads it.

Captions become text here, the same way for every layout.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

CAPTION_KEYS = ("captions", "caption", "title", "text", "texts", "sentences", "description")
"""Names under which tables in use keep their captions, in order of preference."""

SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | {
    name: "val" for name in ("val", "valid", "validation")
}
"""What sources call their splits, and what they are here."""

_BREAKS = "\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_BREAK_RUN = re.compile(f"[{_BREAKS}]+")


@dataclass(frozen=True)
class Pair:
    """One picture with its captions, as a source gives it."""

    key: str
    """The picture's name inside its source."""
    image: bytes | Path
    captions: list[str]
    group: str | None
    """Pairs of one group show the same thing."""
    split: str | None
    """train, val or test where the source says so."""
    origin: str
    """Where the record stands, for people: file, and line where there is one."""
    label: str | None = None
    """The picture's class. Pairs of one class are not each other's negatives; unlike those of one
    group they may stand on both sides of a split."""


@dataclass(frozen=True)
class Reject:
    """An input that gives no pair. The reason is `kind: detail`; kinds are counted."""

    key: str
    origin: str
    reason: str

    def read(self) -> "Reject":
        return self


class Item(Protocol):
    def read(self) -> Pair | Reject: ...


@dataclass(frozen=True)
class Source:
    """A listing of pairs on disk."""

    kind: str
    path: Path
    items: Sequence[Item]
    fingerprint: str
    """Changes when the listing changes: names, sizes and times of files, the content of tables."""

    def __len__(self) -> int:
        return len(self.items)

    def read(self, start: int, stop: int) -> Iterator[Pair | Reject]:
        """The pairs of items start .. stop - 1, in order."""
        for item in self.items[start:stop]:
            yield item.read()


@dataclass(frozen=True, kw_only=True)
class Options:
    """What people may have to say about a source."""

    image_key: str | None = None
    """A table's column with the images."""
    caption_key: str | None = None
    """A table's column, or the field of a tar's .json, with the captions."""
    templates: tuple[str, ...] = ()
    """Sentences with "{}" where the name of a class goes."""
    classes: Path | None = None
    """JSON object from class folder to class name, where they differ."""


@dataclass(frozen=True)
class Reader:
    """Knows one layout."""

    expects: str
    """What it looks for, for people."""
    uses: tuple[str, ...]
    """The fields of `Options` that mean something to it."""
    open: Callable[[Path, Options], Source | None]
    """The source at a path, or None where it is of another layout."""


def clean_captions(values: Iterable[str | None]) -> list[str]:
    """Captions as strings on one line each, without empty ones and exact repetitions.

    "None", "NA", "null" and "nan" are words like any other; only a missing value is none.

    Raises:
        ValueError: half a surrogate pair, which no file can hold as UTF-8.
    """
    captions: dict[str, None] = {}
    for value in values:
        if value is None:
            continue
        text = value.replace("\0", "").strip(_BREAKS)
        text = _BREAK_RUN.sub(" ", text)
        text.encode("utf-8")
        if text.strip():
            captions[text] = None
    return list(captions)


def pair_or_reject(
    key: str,
    origin: str,
    image: bytes | Path,
    captions: Iterable[str | None],
    group: str | None = None,
    split: str | None = None,
    label: str | None = None,
) -> Pair | Reject:
    """The pair, or the reject that says why its captions don't make one."""
    try:
        cleaned = clean_captions(captions)
    except ValueError as error:
        return Reject(key, origin, f"bad caption: {error}")
    if not cleaned:
        return Reject(key, origin, "no caption: it has none, or only white space")
    if len(cleaned) > 0xFFFF:  # what rows.npy holds
        return Reject(key, origin, f"bad caption: {len(cleaned):,} captions, at most 65,535")
    return Pair(key, image, cleaned, group, split, origin, label)


def caption_lines(data: bytes) -> list[str]:
    """The captions of a text file, one a line.

    Raises:
        ValueError: not UTF-8.
    """
    return re.split("\r\n|\n|\r", data.decode("utf-8-sig"))


def load_json(text: str | bytes) -> Any:
    """JSON whose numbers and NaN stay as they are written: a caption may be one.

    Raises:
        ValueError: not JSON.
    """
    try:
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_captions(record: Any, key: str) -> list[str | None]:
    """The captions in a record: a string or a list of them, under `key` or ("") a usual name.

    Raises:
        ValueError: there is no such field, or it holds something else.
    """
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    keys = [key] if key else [name for name in CAPTION_KEYS if name in record]
    if not keys or keys[0] not in record:
        raise ValueError(f"no field {key or ' or '.join(CAPTION_KEYS)}")
    value = record[keys[0]]
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str | None) for text in values):
        raise ValueError(f"'{keys[0]}' is neither a string nor a list of strings")
    return values
