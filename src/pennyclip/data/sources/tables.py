"""Tables of image paths and captions: csv, tsv, jsonl and json, read as text and nothing else."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pennyclip.base.errors import RequestError
from pennyclip.data.sources.pairs import CAPTION_KEYS, Options, Reader, Source, load_json
from pennyclip.data.sources.rows import IMAGE_KEYS, Row, address_hint, fingerprint, list_rows

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")

TABLE_NAMES = (
    *("captions.jsonl", "captions.csv", "captions.tsv", "captions.json"),
    *("metadata.jsonl", "metadata.csv"),
)
"""Tables that speak for the folder they lie in; `metadata.*` is Hugging Face's imagefolder."""

LOOKED_AT = 100  # JSON objects by which the columns are found. chosen: some may lack a key
DELIMITERS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}

csv.field_size_limit(1 << 24)  # chosen: a caption of 16 MB is a runaway quote


@dataclass(frozen=True)
class Table:
    columns: list[str]
    found: str
    """How the columns were found, for messages."""
    rows: Iterable[tuple[int, Row]]
    """Each with its line, or its number in a JSON array."""


def open_table(path: Path, options: Options) -> Source | None:
    """A table, or the one that speaks for its folder."""
    if path.is_dir():
        named = next((path / name for name in TABLE_NAMES if (path / name).is_file()), None)
        return None if named is None else _open(named, options)
    return _open(path, options) if path.suffix.lower() in TABLE_SUFFIXES else None


def open_lone_table(path: Path, options: Options) -> Source | None:
    """The only table in a folder, whatever it is called."""
    if not path.is_dir():
        return None
    suffixes = set(TABLE_SUFFIXES) - {".json"}  # that may be anything
    tables = [file for file in path.iterdir() if file.suffix.lower() in suffixes]
    return _open(tables[0], options) if len(tables) == 1 else None


def _open(path: Path, options: Options) -> Source:
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
    if path.suffix.lower() == ".json":
        table = _json_list(text, path)
    elif path.suffix.lower() in (".jsonl", ".ndjson"):
        table = _json_rows(text, path)
    else:
        table = _csv_rows(text, path, options.image_key, options.caption_key)
    image = _column(table, path, "image", options.image_key, IMAGE_KEYS)
    caption = _column(table, path, "caption", options.caption_key, CAPTION_KEYS)
    for name in (image, caption):
        if table.columns.count(name) > 1:
            raise RequestError(
                f"{path}: the header has '{name}' {table.columns.count(name)} times. Rename all "
                "but the one that is meant."
            )
    items = list_rows(table.rows, path, path.parent, image, caption)
    return Source("table", path, items, fingerprint([data], items))


def _column(table: Table, path: Path, what: str, wanted: str | None, usual: tuple[str, ...]) -> str:
    """The column that is wanted, or else the first with a usual name.

    Raises:
        RequestError: there is none; what was looked for and what was found are named.
    """
    if wanted is not None and wanted in table.columns:
        return wanted
    if wanted is None:
        by_lower = {name.strip().lower(): name for name in reversed(table.columns)}
        for name in usual:
            if name in by_lower:
                return by_lower[name]
    looked = f"'{wanted}'" if wanted is not None else f"any of {', '.join(usual)}"
    hint = address_hint(table.columns) if what == "image" else ""
    raise RequestError(
        f"{path}: no column for the {what}. Looked for {looked}; {table.found}: "
        f"{', '.join(map(repr, table.columns))}. Name the right one with --{what}-key.{hint}"
    )


def _json_rows(text: str, path: Path) -> Table:
    rows = list(_parse_json(text))
    if not any(isinstance(row, dict) for _, row in rows):
        why = f" Line {rows[0][0]}: {rows[0][1]}." if rows else ""
        raise RequestError(f"{path}: expected one JSON object a line, found none.{why}")
    return Table(_keys(rows), f"the first {LOOKED_AT} lines have the keys", rows)


def _json_list(text: str, path: Path) -> Table:
    """One JSON array of objects; they are counted from 1."""
    try:
        tree = load_json(text)
        json.dumps(tree, ensure_ascii=False).encode()
    except ValueError as error:
        raise RequestError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(tree, list) or not any(isinstance(row, dict) for row in tree):
        kind = f"an object with {', '.join(map(repr, list(tree)[:6]))}"
        raise RequestError(
            f"{path}: expected an array of objects, one a picture, or COCO's captions (an object "
            f"with 'images' and 'annotations'); found {kind if isinstance(tree, dict) else 'none'}."
        )
    rows: list[tuple[int, Row]] = [
        (number, row if isinstance(row, dict) else "bad row: not a JSON object")
        for number, row in enumerate(tree, start=1)
    ]
    return Table(_keys(rows), f"the first {LOOKED_AT} objects have the keys", rows)


def _keys(rows: list[tuple[int, Row]]) -> list[str]:
    return list({key: None for _, row in rows[:LOOKED_AT] if isinstance(row, dict) for key in row})


def _parse_json(text: str) -> Iterator[tuple[int, Row]]:
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


def _csv_rows(text: str, path: Path, image_key: str | None, caption_key: str | None) -> Table:
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

    def records() -> Iterator[tuple[int, Row]]:
        for line, row in rows[1:]:
            if len(row) < wide or any(row[wide:]):
                yield line, f"bad row: {len(row)} fields, and the header has {wide}"
            else:
                yield line, dict(zip(header, row, strict=False))

    name = DELIMITERS[delimiter]
    return Table(header, f"the header, cut at {delimiter!r} ({name}), has", records())


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


TABLE = Reader(
    f"a table with a column of image paths and one of captions ({', '.join(TABLE_SUFFIXES)}), or "
    f"a folder with {' or '.join(TABLE_NAMES[:2])}",
    ("image_key", "caption_key"),
    open_table,
)
LONE_TABLE = Reader(
    "a folder with no more than one such table", ("image_key", "caption_key"), open_lone_table
)
