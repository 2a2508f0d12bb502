"""Tables of image paths and captions: csv, tsv, jsonl and json, read as text and nothing else.

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
from typing import Any, Protocol

from pennyclip.data.sources.pairs import (
    CAPTION_KEYS,
    SPLITS,
    Item,
    Options,
    Pair,
    Reader,
    Reject,
    Source,
    file_state,
    json_captions,
    load_json,
    pair_or_reject,
    shown,
)
from pennyclip.errors import RequestError

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")

TABLE_NAMES = (
    *("captions.jsonl", "captions.csv", "captions.tsv", "captions.json"),
    *("metadata.jsonl", "metadata.csv"),
)
"""Tables that speak for the folder they lie in; `metadata.*` is Hugging Face's imagefolder."""

IMAGE_KEYS = (
    *("image", "image_path", "img", "img_path", "filepath", "file_path"),
    *("path", "file_name", "filename", "file", "image_file", "image_name"),
)
"""Names under which tables in use keep the image path, in order of preference."""

DELIMITERS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}

csv.field_size_limit(1 << 24)  # chosen: a caption of 16 MB is a runaway quote


class Cell(Protocol):
    """A picture inside a table."""

    def read(self) -> bytes | str:
        """Its bytes, or the path that stands in their place.

        Raises:
            ValueError: neither is there.
        """
        ...


@dataclass
class TableItem:
    root: Path
    key: str
    origin: str
    group: str | None
    split: str | None
    captions: list[str | None] = field(default_factory=list)
    cell: Cell | None = None
    """None: the key is the picture's path."""

    def read(self) -> Pair | Reject:
        image: bytes | str = self.key
        if self.cell is not None:
            try:
                image = self.cell.read()
            except ValueError as error:
                return Reject(self.key, self.origin, str(error))
        if isinstance(image, str):
            if "://" in image[:12]:
                return Reject(
                    self.key, self.origin, "an address: prepare reads files and doesn't download"
                )
            image_at: bytes | Path = self.root / image  # an absolute path stays as it is
        else:
            image_at = image
        return pair_or_reject(
            self.key, self.origin, image_at, self.captions, self.group, self.split
        )


@dataclass(frozen=True)
class Rows:
    columns: list[str]
    found: str
    """How the columns were found, for messages."""
    rows: Iterable[tuple[int, dict[str, Any] | str]]
    """Line number, and the row by column or the reason why it is none."""


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
    image = column(table, path, "image", options.image_key, IMAGE_KEYS)
    caption = column(table, path, "caption", options.caption_key, CAPTION_KEYS)
    for name in (image, caption):
        if table.columns.count(name) > 1:
            raise RequestError(
                f"{path}: the header has '{name}' {table.columns.count(name)} times. Rename all "
                "but the one that is meant."
            )
    items = list_rows(table, path, path.parent, image, caption)
    return Source("table", path, items, fingerprint([data], items))


def list_rows(
    table: Rows,
    path: Path,
    root: Path,
    image_column: str,
    caption_column: str,
    split: str | None = None,
) -> list[Item]:
    """The pairs of a table's rows; rows that name the same picture are one.

    Args:
        table: the rows; a picture is a path, or a tuple of its key and its `Cell`.
        path: the table, for messages.
        root: where relative paths start.
        image_column: as found by `column`.
        caption_column: likewise.
        split: of rows that have none of their own.
    """
    items: list[Item] = []
    known: dict[tuple[str, str | None, str | None], TableItem] = {}
    for line, row in table.rows:
        origin = f"{shown(path.name)}:{line}"
        if isinstance(row, str):
            items.append(Reject("", origin, row))
            continue
        key, cell = row.get(image_column), None
        if isinstance(key, tuple):
            key, cell = key
        if not isinstance(key, str) or not key.strip():
            items.append(Reject("", origin, f"bad row: no image path under '{image_column}'"))
            continue
        try:
            captions = json_captions(row, caption_column)
        except ValueError as error:
            items.append(Reject(key, origin, f"bad row: {error}"))
            continue
        if not any(caption is not None and caption.strip() for caption in captions):
            items.append(Reject(key, origin, "no caption: it has none, or only white space"))
            continue
        own_split = _split(row.get("split"), path, line) or split
        group = str(row["group"]) if row.get("group") not in (None, "") else None
        item = known.get((key, own_split, group)) if cell is None else None
        if item is None:
            item = TableItem(root, key, origin, group, own_split, [], cell)
            items.append(item)
            if cell is None:
                known[key, own_split, group] = item
        item.captions += captions
    return items


def fingerprint(tables: Iterable[bytes], items: Iterable[Item]) -> str:
    """Changes when the tables change, or the size or time of a picture that they name."""
    digest = blake2b(digest_size=16)
    for data in tables:
        digest.update(data)
    for item in items:
        if isinstance(item, TableItem) and item.cell is None and "://" not in item.key[:12]:
            digest.update(file_state(item.root / item.key))
    return digest.hexdigest()


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


def column(table: Rows, path: Path, what: str, wanted: str | None, usual: tuple[str, ...]) -> str:
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
    hint = ""
    if what == "image" and any("url" in name.lower() for name in table.columns):
        hint = " Addresses are not downloaded: fetch them first (img2dataset writes tars)."
    raise RequestError(
        f"{path}: no column for the {what}. Looked for {looked}; {table.found}: "
        f"{', '.join(map(repr, table.columns))}. Name the right one with --{what}-key.{hint}"
    )


def _json_rows(text: str, path: Path) -> Rows:
    rows = list(_parse_json(text))
    first = next((row for _, row in rows if isinstance(row, dict)), None)
    if first is None:
        why = f" Line {rows[0][0]}: {rows[0][1]}." if rows else ""
        raise RequestError(f"{path}: expected one JSON object a line, found none.{why}")
    columns = {key: None for _, row in rows[:100] if isinstance(row, dict) for key in row}
    return Rows(list(columns), "the first 100 lines have the keys", rows)


def _json_list(text: str, path: Path) -> Rows:
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
    rows = [
        (number, row if isinstance(row, dict) else "bad row: not a JSON object")
        for number, row in enumerate(tree, start=1)
    ]
    columns = {key: None for row in tree[:100] if isinstance(row, dict) for key in row}
    return Rows(list(columns), "the first 100 objects have the keys", rows)


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


def _csv_rows(text: str, path: Path, image_key: str | None, caption_key: str | None) -> Rows:
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
    return Rows(header, f"the header, cut at {delimiter!r} ({name}), has", records())


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
