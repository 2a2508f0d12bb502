"""Tables of image paths and captions: csv, tsv and jsonl, read as text and nothing but text.

Rows that name the same image are one pair with several captions. Relative paths start at the
table's folder. A `split` column (train, val, test) and a `group` column are used where present.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pennyclip.data.pairs import (
    CAPTION_KEYS,
    Item,
    Pair,
    Reject,
    Source,
    json_captions,
    load_json,
    pair_or_reject,
    shown,
)
from pennyclip.errors import RequestError

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")

IMAGE_KEYS = (
    *("image", "image_path", "img", "img_path", "filepath", "file_path"),
    *("path", "file_name", "filename", "file", "image_file", "image_name"),
)
"""Names under which tables in use keep the image path, in order of preference."""

SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"} | {
    name: "val" for name in ("val", "valid", "validation")
}

DELIMITERS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}

csv.field_size_limit(1 << 24)  # chosen: a caption of 16 MB is a runaway quote


@dataclass
class TableItem:
    root: Path
    key: str
    origin: str
    group: str | None
    split: str | None
    captions: list[str | None] = field(default_factory=list)

    def read(self) -> Pair | Reject:
        if "://" in self.key[:12]:
            return Reject(
                self.key, self.origin, "an address: prepare reads files and doesn't download"
            )
        image = self.root / self.key  # an absolute path stays as it is
        return pair_or_reject(self.key, self.origin, image, self.captions, self.group, self.split)


@dataclass(frozen=True)
class _Rows:
    columns: list[str]
    found: str
    """How the columns were found, for messages."""
    rows: Iterable[tuple[int, dict[str, Any] | str]]
    """Line number, and the row by column or the reason why it is none."""


def open_table(path: Path, *, image_key: str | None, caption_key: str | None) -> Source:
    """List a table's pairs.

    Raises:
        RequestError: not UTF-8, no such column, a row that cannot be told apart from the next,
            or a split other than train, val and test.
    """
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RequestError(
            f"{path}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x}). "
            "Save the table as UTF-8."
        ) from None
    jsonl = path.suffix.lower() in (".jsonl", ".ndjson")
    table = _json_rows(text, path) if jsonl else _csv_rows(text, path, image_key, caption_key)
    image_column = _column(table, path, "image", image_key, IMAGE_KEYS)
    caption_column = _column(table, path, "caption", caption_key, CAPTION_KEYS)

    items: list[Item] = []
    known: dict[tuple[str, str | None, str | None], TableItem] = {}
    for line, row in table.rows:
        origin = f"{shown(path.name)}:{line}"
        if isinstance(row, str):
            items.append(Reject("", origin, row))
            continue
        key = row.get(image_column)
        if not isinstance(key, str) or not key.strip():
            items.append(Reject("", origin, f"bad row: no image path under '{image_column}'"))
            continue
        try:
            captions = json_captions(row, caption_column)
        except ValueError as error:
            items.append(Reject(key, origin, f"bad row: {error}"))
            continue
        split = _split(row.get("split"), path, line)
        group = str(row["group"]) if row.get("group") not in (None, "") else None
        item = known.get((key, split, group))
        if item is None:
            item = TableItem(path.parent, key, origin, group, split)
            items.append(item)
            known[key, split, group] = item
        item.captions += captions
    fingerprint = blake2b(data, digest_size=16).hexdigest()
    return Source("table", path, items, fingerprint)


def _split(value: object, path: Path, line: int) -> str | None:
    if value is None or not str(value).strip():
        return None
    split = SPLITS.get(str(value).strip().lower())
    if split is None:
        raise RequestError(
            f"{path}, line {line}: split '{value}', expected one of {', '.join(SPLITS)}, or empty."
            " Rename it there, or rename the column if it means something else."
        )
    return split


def _column(table: _Rows, path: Path, what: str, wanted: str | None, usual: tuple[str, ...]) -> str:
    if wanted is not None and wanted in table.columns:
        return wanted
    if wanted is None:
        by_lower = {column.strip().lower(): column for column in reversed(table.columns)}
        for name in usual:
            if name in by_lower:
                return by_lower[name]
    looked = f"'{wanted}'" if wanted is not None else f"any of {', '.join(usual)}"
    hint = ""
    if what == "image" and any("url" in column.lower() for column in table.columns):
        hint = " Addresses are not downloaded: fetch them first (img2dataset writes tars)."
    raise RequestError(
        f"{path}: no column for the {what}. Looked for {looked}; {table.found}: "
        f"{', '.join(map(repr, table.columns))}. Name the right one with --{what}-key.{hint}"
    )


def _json_rows(text: str, path: Path) -> _Rows:
    rows = list(_parse_json(text))
    first = next((row for _, row in rows if isinstance(row, dict)), None)
    if first is None:
        why = f" Line {rows[0][0]}: {rows[0][1]}." if rows else ""
        raise RequestError(f"{path}: expected one JSON object a line, found none.{why}")
    columns = {key: None for _, row in rows[:100] if isinstance(row, dict) for key in row}
    return _Rows(list(columns), "the first 100 lines have the keys", rows)


def _parse_json(text: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = load_json(line)
            if "\\u" in line:  # the only way to write half a surrogate pair, which no file can hold
                json.dumps(row, ensure_ascii=False).encode()
        except ValueError as error:
            yield number, f"bad row: not valid JSON: {error}"
            continue
        yield number, row if isinstance(row, dict) else "bad row: not a JSON object"


def _csv_rows(text: str, path: Path, image_key: str | None, caption_key: str | None) -> _Rows:
    delimiter = _delimiter(text, path, image_key, caption_key)
    try:
        rows = list(_parse_csv(text, delimiter, csv.QUOTE_MINIMAL))
    except csv.Error as error:
        if delimiter != "\t":
            raise RequestError(
                f"{path}: the quotes don't add up ({error}). A field that holds a quote, a "
                f"{DELIMITERS[delimiter]} or a line break is written in quotes, its quotes doubled."
            ) from None
        rows = list(_parse_csv(text, delimiter, csv.QUOTE_NONE))  # tab tables often quote nothing
    if not rows:
        raise RequestError(f"{path}: the table is empty. Expected a header and a row for an image.")
    header = rows[0][1]
    wide = len(header)

    def records() -> Iterator[tuple[int, dict[str, Any] | str]]:
        for line, row in rows[1:]:
            if len(row) < wide or any(row[wide:]):
                yield line, f"bad row: {len(row)} fields, and the header has {wide}"
            else:
                yield line, dict(zip(header, row, strict=False))

    name = DELIMITERS[delimiter]
    return _Rows(header, f"the header, cut at {delimiter!r} ({name}), has", records())


def _parse_csv(text: str, delimiter: str, quoting: Any) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True
    )
    line = 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise csv.Error(f"in the row that starts on line {line}: {error}") from None


def _delimiter(text: str, path: Path, image_key: str | None, caption_key: str | None) -> str:
    """The delimiter under which the header names the wanted columns, or else the most columns."""
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    line = re.split("[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]

    def score(delimiter: str) -> tuple[int, int, bool]:
        columns = next(csv.reader([line], delimiter=delimiter), [])
        lowered = {column.strip().lower() for column in columns}
        image = image_key in columns if image_key else bool(lowered & set(IMAGE_KEYS))
        caption = caption_key in columns if caption_key else bool(lowered & set(CAPTION_KEYS))
        return image + caption, len(columns), delimiter == usual

    return max(DELIMITERS, key=score)
