"""Parquet and Arrow tables: pictures as bytes inside them, or as paths.

The listing holds captions and paths. A picture's bytes are read when they are wanted, in batches
from the front: neighbours are wanted one after the other.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq
import pyarrow.types as types

from pennyclip.base.errors import RequestError
from pennyclip.data.sources.files import listing_fingerprint, shown, walk
from pennyclip.data.sources.pairs import (
    CAPTION_KEYS,
    SPLITS,
    Item,
    Options,
    Reader,
    Source,
)
from pennyclip.data.sources.rows import IMAGE_KEYS, Row, address_hint, fingerprint, list_rows

COLUMN_SUFFIXES = (".parquet", ".arrow", ".feather")
BYTES_KEYS = (*IMAGE_KEYS, "jpg", "jpeg", "png", "webp", "bytes", "image_bytes", "img_bytes")
"""Names under which tables in use keep pictures; jpg, png and webp are img2dataset's."""

BATCH = 64  # pictures read together. chosen: some MB
_NAMED_SPLIT = re.compile(r"([a-z]+)([-_.]\d+.*)?", re.I)  # train-00000-of-00003, val, test_1


def open_columns(path: Path, options: Options) -> Source | None:
    """A table, or every one at any depth of a folder; a file called train-00000-of-00002.parquet,
    val.parquet and the like says the split of its rows.

    Raises:
        RequestError: see `list_columns`.
    """
    found = walk(path) if path.is_dir() else [path]
    files = [file for file in found if file.suffix.lower() in COLUMN_SUFFIXES]
    if not files:
        return None
    splits = []
    for file in files:
        named = _NAMED_SPLIT.fullmatch(file.stem)
        splits.append(SPLITS.get(named[1].lower()) if named else None)
    return list_columns("columns", path, files, splits, options)


def list_columns(
    kind: str, path: Path, files: Sequence[Path], splits: Sequence[str | None], options: Options
) -> Source:
    """The pairs in some files, each with the split of those rows that have none of their own.

    Raises:
        RequestError: a file cannot be read, or has no column of images or of captions.
    """
    items: list[Item] = []
    for file, split in zip(files, splits, strict=True):
        try:
            items += _list(file, split, options)
        except (pa.ArrowException, OSError) as error:
            raise RequestError(
                f"{file} cannot be read as {file.suffix[1:]}: {error}. Fetch or write it again."
            ) from None
    listing = listing_fingerprint(path, files).encode()
    return Source(kind, path, items, fingerprint([listing], items))


def _list(file: Path, split: str | None, options: Options) -> list[Item]:
    kinds = {field.name: field.type for field in _schema(file)}
    image = _choose(kinds, options.image_key, BYTES_KEYS, _holds_bytes)
    if image is None:  # paths: no guess, as any text may be the captions
        image = _choose(kinds, options.image_key, IMAGE_KEYS, _is_text, guess=False)
    others = {name: kind for name, kind in kinds.items() if name != image}
    caption = _choose(others, options.caption_key, CAPTION_KEYS, _is_caption)
    if image is None or caption is None:
        what, needed = "caption", "strings or lists of strings"
        if image is None:
            what, needed = "image", "bytes, paths, or structs of both"
        hint = address_hint(kinds) if image is None else ""
        columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise RequestError(
            f"{file}: no column for the {what}, of {needed}; it has {columns}. Name the right one "
            f"with --{what}-key.{hint}"
        )
    rows = _rows(file, kinds, image, caption)
    return list_rows(rows, file, file.parent, image, caption, split)


def _choose(
    kinds: dict[str, pa.DataType],
    wanted: str | None,
    usual: Sequence[str],
    fits: Callable[[pa.DataType], bool],
    guess: bool = True,
) -> str | None:
    """The wanted column; or of those of the right kind the first usual name, or the only one."""
    fitting = [name for name, kind in kinds.items() if fits(kind)]
    if wanted is not None:
        return wanted if wanted in fitting else None
    by_lower = {name.lower(): name for name in reversed(fitting)}
    named = next((by_lower[name] for name in usual if name in by_lower), None)
    return fitting[0] if named is None and guess and len(fitting) == 1 else named


def _rows(
    file: Path, kinds: dict[str, pa.DataType], image: str, caption: str
) -> Iterator[tuple[int, Row]]:
    """Rows counted from 0, with a key and a `Cell` in place of a picture's bytes."""
    wanted = [caption, *(n for n in ("split", "group") if n in kinds and n not in (image, caption))]
    path = None if _is_text(kinds[image]) else f"{image}.path"
    if path is None:
        wanted.append(image)
    elif types.is_struct(kinds[image]) and kinds[image].get_field_index("path") >= 0:
        wanted.append(path)
    number = 0
    for _, batch in _batches(file, wanted, 0):
        for values in batch.to_pylist():
            row = {name: _text(value) for name, value in values.items()}
            if path is not None:
                key = row.get(path) or f"{shown(file.name)}:{number}"
                row[image] = (key, EmbeddedImage(file, image, number))
            yield number, row
            number += 1


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) else value


@dataclass(frozen=True)
class EmbeddedImage:
    file: Path
    column: str
    row: int

    def read(self) -> bytes | str:
        try:
            value = _cursor.value(self.file, self.column, self.row)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"unreadable: {error}") from None
        path = None
        if isinstance(value, dict):
            value, path = value["bytes"], value.get("path")
        if value is not None:
            return bytes(value)
        if path:
            return str(path)
        raise ValueError(f"no picture: '{self.column}' is empty")


class _Cursor:
    """Where this process last read. Going on from there costs one batch, whatever the table."""

    def __init__(self) -> None:
        self.key: tuple[Path, str] | None = None
        self.first = 0
        self.values: Any = ()
        self.batches: Iterator[tuple[int, pa.RecordBatch]] = iter(())

    def value(self, file: Path, column: str, row: int) -> Any:
        if self.key != (file, column) or row < self.first:
            self.key, self.values = (file, column), ()
            self.batches = _batches(file, [column], row)
        key, self.key = self.key, None  # what fails is no place to go on from
        while not self.first <= row < self.first + len(self.values):
            self.first, batch = next(self.batches, (0, None))
            if batch is None:
                raise ValueError(f"unreadable: it has no row {row} any more")
            self.values = batch.column(0)
        self.key = key
        return self.values[row - self.first].as_py()


_cursor = _Cursor()


def _schema(file: Path) -> pa.Schema:
    if file.suffix.lower() == ".parquet":
        with pq.ParquetFile(file, memory_map=True) as table:
            return table.schema_arrow
    return _arrow(file).schema


def _batches(file: Path, columns: list[str], row: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of some columns, each with the number of its first row: from the one that holds
    `row` on, or from an earlier one. A column "a.b" is the field b of the structs in a."""
    first = 0
    if file.suffix.lower() == ".parquet":
        with pq.ParquetFile(file, memory_map=True, pre_buffer=False) as table:
            groups = list(range(table.num_row_groups))
            while groups and first + table.metadata.row_group(groups[0]).num_rows <= row:
                first += table.metadata.row_group(groups.pop(0)).num_rows
            for batch in table.iter_batches(BATCH, groups, columns):
                yield first, _select(batch, columns)
                first += len(batch)
        return
    for batch in _arrow_batches(file):
        for start in range(max(0, row - first), len(batch), BATCH):
            yield first + start, _select(batch.slice(start, BATCH), columns)
        first += len(batch)


def _select(batch: pa.RecordBatch, columns: list[str]) -> pa.RecordBatch:
    arrays = [
        batch.column(name)
        if name in batch.schema.names
        else pc.struct_field(batch.column(name.rpartition(".")[0]), name.rpartition(".")[2])
        for name in columns
    ]
    selected = pa.RecordBatch.from_arrays(arrays, columns)
    selected.validate(full=True)  # a stranger's offsets may point anywhere
    return selected


def _arrow(file: Path) -> Any:
    source = pa.memory_map(str(file))
    try:
        return pa.ipc.open_file(source)
    except pa.ArrowInvalid:  # the other of the two formats: Hugging Face's `datasets` writes it
        source.seek(0)
        return pa.ipc.open_stream(source)


def _arrow_batches(file: Path) -> Iterator[pa.RecordBatch]:
    reader = _arrow(file)
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def _holds_bytes(kind: pa.DataType) -> bool:
    if types.is_struct(kind):
        at = kind.get_field_index("bytes")
        return at >= 0 and _holds_bytes(kind.field(at).type)
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _is_text(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _is_caption(kind: pa.DataType) -> bool:
    is_list = types.is_list(kind) or types.is_large_list(kind)
    return _is_text(kind.value_type if is_list else kind)


COLUMNS = Reader(
    f"a {', '.join(COLUMN_SUFFIXES)} table with images (bytes or paths) and captions, or a folder "
    "of them",
    ("image_key", "caption_key"),
    open_columns,
)
