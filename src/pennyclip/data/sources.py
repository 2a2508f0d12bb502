"""Where pairs come from: a folder with text files, a table, webdataset tars.

`open_source` recognises what lies on disk and lists it; nothing but the listing is held. A source
is a sequence of items that can be pickled, each of which reads its own pair, so that any process
can take any slice. A new layout is one function that returns a `Source`, and its item class.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pennyclip.data.pairs import (
    IMAGE_SUFFIXES,
    Item,
    Pair,
    Reject,
    Source,
    caption_lines,
    listing_fingerprint,
    pair_or_reject,
    shown,
)
from pennyclip.data.tables import TABLE_SUFFIXES, open_table
from pennyclip.data.tars import open_tars
from pennyclip.errors import RequestError

__all__ = ["Item", "Pair", "Reject", "Source", "open_source"]

TABLE_NAMES = (
    *("captions.jsonl", "captions.csv", "captions.tsv"),
    *("metadata.jsonl", "metadata.csv"),
)
"""Tables that speak for the folder they lie in; `metadata.*` is Hugging Face's imagefolder."""


def open_source(
    path: str | os.PathLike[str], *, image_key: str | None = None, caption_key: str | None = None
) -> Source:
    """Recognise a source by what is on disk, and list it.

    - a table (.csv, .tsv, .jsonl), or a folder that holds `captions.*`, `metadata.*` or one
      table: one or several captions an image, see `pennyclip.data.tables`;
    - a webdataset tar, or a folder of them;
    - a folder of pictures, each beside a text file of the same stem, at any depth.

    A text file (and a tar's .txt) holds one caption a line. Elsewhere a run of line breaks inside
    a caption becomes one space; NULs are removed; everything else stays as it is written. A
    caption of nothing but white space is none.

    Args:
        path: file or folder.
        image_key: the table's column with the image path; unset: guessed from common names.
        caption_key: the table's column (or the field of a tar's .json) with the captions.

    Raises:
        RequestError: nothing is there, it is not one of the above, or a column is missing.
    """
    path = Path(path)
    if not path.exists():
        raise RequestError(f"The source {path} doesn't exist (looked from {Path.cwd()}).")
    if path.is_file():
        table = path if path.suffix.lower() in TABLE_SUFFIXES else None
        tars = [path] if path.suffix == ".tar" else []
    else:
        table = next((path / name for name in TABLE_NAMES if (path / name).is_file()), None)
        tars = sorted(path.glob("*.tar"))
    if table is None and not tars and path.is_dir():
        folder = _open_folder(path)
        if folder is not None:
            _refuse_keys(path, "table or tar", image_key=image_key, caption_key=caption_key)
            return folder
        tables = [entry for entry in path.iterdir() if entry.suffix.lower() in TABLE_SUFFIXES]
        table = tables[0] if len(tables) == 1 else None
    if table is not None:
        return open_table(table, image_key=image_key, caption_key=caption_key)
    if tars:
        if path.is_dir() and _open_folder(path) is not None:
            raise RequestError(
                f"{path} holds both webdataset tars ({tars[0].name}) and pictures with text files. "
                "Give the tars by name, or move one of the two elsewhere."
            )
        _refuse_keys(path, "table", image_key=image_key)
        return open_tars(path, tars, caption_key)
    raise RequestError(
        f"{path} is no source that prepare knows: {_seen(path)}. Give one of: a table with a "
        f"column of image paths and one of captions ({', '.join(TABLE_SUFFIXES)}); a folder with "
        f"such a table named {' or '.join(TABLE_NAMES[:2])}; a webdataset .tar or a folder of "
        "them; a folder of pictures, each with a .txt of the same name beside it."
    )


def _refuse_keys(path: Path, wanted: str, **keys: str | None) -> None:
    for name, value in keys.items():
        if value is not None:
            raise RequestError(
                f"--{name.replace('_', '-')} {value} names a column, and {path} is no {wanted}. "
                "Leave it out, or give the table."
            )


def _seen(path: Path) -> str:
    if path.is_file():
        return f"a file ending in '{path.suffix}'"
    counts: dict[str, int] = {}
    for _, name in _walk(path):
        suffix = Path(name).suffix.lower() or "no suffix"
        counts[suffix] = counts.get(suffix, 0) + 1
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:6]
    files = ", ".join(f"{count} x {suffix}" for suffix, count in common)
    return f"a folder holding {files}" if files else "an empty folder"


@dataclass(frozen=True)
class FolderItem:
    image: Path
    text: Path
    key: str

    def read(self) -> Pair | Reject:
        try:
            captions = caption_lines(self.text.read_bytes())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return Reject(self.key, self.key, f"bad caption: {shown(self.text.name)}: {reason}")
        return pair_or_reject(self.key, self.key, self.image, captions)


def _walk(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every file at any depth in sorted order, hidden ones left out; links are followed once."""
    visited = set()
    for where, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(where)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(where), name


def _open_folder(path: Path) -> Source | None:
    files = [folder / name for folder, name in _walk(path)]
    texts = {file.with_suffix(""): file for file in files if file.suffix.lower() == ".txt"}
    items: list[Item] = []
    used: list[Path] = []
    described: set[Path] = set()
    for file in files:
        stem = file.with_suffix("") if file.suffix else file
        is_image = file.suffix.lower() in IMAGE_SUFFIXES or (not file.suffix and stem in texts)
        if not is_image:
            continue
        key = shown(file.relative_to(path))
        if stem in texts:
            items.append(FolderItem(file, texts[stem], key))
            described.add(stem)
            used += [file, texts[stem]]
        else:
            items.append(Reject(key, key, f"no caption: {shown(stem.name)}.txt is not beside it"))
    if not described:
        return None
    for stem, text in texts.items():
        if stem not in described:
            key = shown(text.relative_to(path))
            items.append(Reject(key, key, "no picture: none of the same name is beside it"))
    return Source("folder", path, items, listing_fingerprint(path, used))
