"""Rows of tables of any kind: how they become pairs, and what identifies them.

Rows that name the same picture are one pair with several captions. Relative paths start at the
table's folder. A `split` column (train, val, test) and a `group` column are used where present.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from pennyclip.base.errors import RequestError
from pennyclip.data.sources.files import file_state, shown
from pennyclip.data.sources.pairs import SPLITS, Item, Pair, Reject, json_captions, pair_or_reject

IMAGE_KEYS = (
    *("image", "image_path", "img", "img_path", "filepath", "file_path"),
    *("path", "file_name", "filename", "file", "image_file", "image_name"),
)
"""Names under which tables in use keep the image path, in order of preference."""

Row = dict[str, Any] | str
"""Values by column; or the reason why it is none."""


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
        if isinstance(image, str) and _is_address(image):
            return Reject(
                self.key, self.origin, "an address: prepare reads files and doesn't download"
            )
        found = image if isinstance(image, bytes) else self.root / image  # which may be absolute
        return pair_or_reject(self.key, self.origin, found, self.captions, self.group, self.split)


def list_rows(
    rows: Iterable[tuple[int, Row]],
    path: Path,
    root: Path,
    image_column: str,
    caption_column: str,
    split: str | None = None,
) -> list[Item]:
    """The pairs of a table's rows; rows that name the same picture are one.

    Args:
        rows: each with its number; a picture is a path, or a tuple of its key and its `Cell`.
        path: the table, for messages.
        root: where relative paths start.
        image_column: where the picture stands.
        caption_column: where its captions do.
        split: of rows that have none of their own.
    """
    items: list[Item] = []
    known: dict[tuple[str, str | None, str | None], TableItem] = {}
    for line, row in rows:
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
        if isinstance(item, TableItem) and item.cell is None and not _is_address(item.key):
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


def _is_address(image: str) -> bool:
    return "://" in image[:12]


def address_hint(columns: Iterable[str]) -> str:
    """What a message adds where a table seems to hold addresses instead of pictures."""
    if not any("url" in name.lower() for name in columns):
        return ""
    return " Addresses are not downloaded: fetch them first (img2dataset writes tars)."
