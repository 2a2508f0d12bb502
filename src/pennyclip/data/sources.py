"""Where pairs come from: a folder with text files, a table, webdataset tars.

`open_source` recognises what lies on disk and lists it; nothing but the listing is held. A source
is a sequence of items that can be pickled, each of which reads its own pair, so that any process
can take any slice. A new layout is one function that returns a `Source`, and its item class.
"""

import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from pennyclip.errors import RequestError

IMAGE_SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .gif .bmp .tif .tiff .webp .avif .jp2 .ppm .pgm .heic .svg".split()
)
"""File names that claim to be a picture. What cannot be read is refused when decoding."""

CAPTION_KEYS = ("captions", "caption", "title", "text", "texts", "sentences", "description")
"""Names under which tables in use keep their captions, in order of preference."""

TABLE_NAMES = ("captions.jsonl", "captions.csv", "captions.tsv")
TABLE_NAMES += ("metadata.jsonl", "metadata.csv")
"""Tables that speak for the folder they lie in; `metadata.*` is Hugging Face's imagefolder."""

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
    from pennyclip.data.tables import TABLE_SUFFIXES, open_table

    path = Path(path)
    if not path.exists():
        raise RequestError(f"The source {path} doesn't exist (looked from {Path.cwd()}).")
    table = path if path.is_file() else _table_of(path, TABLE_SUFFIXES)
    if table is not None and table.suffix.lower() in TABLE_SUFFIXES:
        return open_table(table, image_key=image_key, caption_key=caption_key)
    if image_key is not None:
        raise RequestError(
            f"--image-key {image_key} names a table's column, and {path} is not a table "
            f"({', '.join(TABLE_SUFFIXES)}). Leave it out, or give the table itself."
        )
    tars = [path] if path.is_file() else sorted(path.glob("*.tar"))
    if tars and all(tar.suffix == ".tar" for tar in tars):
        return _open_tars(path, tars, caption_key)
    if path.is_dir():
        source = _open_folder(path)
        if source is not None:
            return source
    raise RequestError(
        f"{path} is no source that prepare knows: {_seen(path)}. Give one of: a table with a "
        f"column of image paths and one of captions ({', '.join(TABLE_SUFFIXES)}); a folder with "
        f"such a table named {' or '.join(TABLE_NAMES[:2])}; a webdataset .tar or a folder of "
        "them; a folder of pictures, each with a .txt of the same name beside it."
    )


def _table_of(folder: Path, suffixes: Iterable[str]) -> Path | None:
    for name in TABLE_NAMES:
        if (folder / name).is_file():
            return folder / name
    if any(folder.glob("*.tar")) or any(folder.rglob("*.txt")):
        return None
    tables = [entry for entry in folder.iterdir() if entry.suffix.lower() in suffixes]
    return tables[0] if len(tables) == 1 else None


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


def clean_captions(values: Iterable[object]) -> list[str]:
    """Captions as strings on one line each, without empty ones and exact repetitions.

    "None", "NA", "null" and "nan" are words like any other; only a missing value is none.

    Raises:
        ValueError: half a surrogate pair, which no file can hold as UTF-8.
    """
    captions: dict[str, None] = {}
    for value in values:
        if value is None:
            continue
        text = str(value).replace("\0", "").strip(_BREAKS)
        text = _BREAK_RUN.sub(" ", text)
        text.encode("utf-8")
        if text.strip():
            captions[text] = None
    return list(captions)


def shown(path: str | os.PathLike[str]) -> str:
    """A file's name as valid text, also where its bytes are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def pair_or_reject(
    key: str,
    origin: str,
    image: bytes | Path,
    captions: Iterable[object],
    group: str | None = None,
    split: str | None = None,
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
    return Pair(key, image, cleaned, group, split, origin)


def caption_lines(data: bytes) -> list[str]:
    """The captions of a text file, one a line.

    Raises:
        ValueError: not UTF-8.
    """
    return re.split("\r\n|\n|\r", data.decode("utf-8-sig"))


def listing_fingerprint(root: Path, files: Iterable[Path]) -> str:
    """Identifies files by name, size and time of change, without reading them."""
    digest = blake2b(digest_size=16)
    for file in files:
        found = file.stat()
        name = os.fsencode(file.relative_to(root) if file != root else file.name)
        digest.update(name + f"\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()


# --- a folder of pictures with text files -----------------------------------------------------


@dataclass(frozen=True)
class FolderItem:
    image: Path
    text: Path
    key: str

    def read(self) -> Pair | Reject:
        try:
            captions = caption_lines(self.text.read_bytes())
        except (OSError, ValueError) as error:
            return Reject(self.key, self.key, f"bad caption: {self.text.name}: {_why(error)}")
        return pair_or_reject(self.key, self.key, self.image, captions)


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


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


# --- webdataset tars --------------------------------------------------------------------------

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
                image, text = (_read_span(file, span) for span in (self.image, self.text))
            captions: Iterable[object] = caption_lines(text)
            if self.caption_key is not None:
                captions = json_captions(json.loads(text), self.caption_key)
        except (OSError, ValueError, KeyError) as error:
            return Reject(self.key, origin, f"bad caption: {error}")
        return pair_or_reject(self.key, origin, image, captions)


def _read_span(file: Any, span: Span) -> bytes:
    file.seek(span[0])
    data: bytes = file.read(span[1])
    return data


def json_captions(record: Any, key: str) -> list[object]:
    """The captions in a JSON object: a string or a list of them, under `key` or a usual name.

    Raises:
        KeyError: there is none.
    """
    keys = [key] if key else [name for name in CAPTION_KEYS if name in record]
    if not keys or keys[0] not in record:
        raise KeyError(f"no field '{key or ' / '.join(CAPTION_KEYS)}'")
    value = record[keys[0]]
    return list(value) if isinstance(value, list) else [value]


def _open_tars(path: Path, tars: list[Path], caption_key: str | None) -> Source:
    items: list[Item] = []
    for tar in tars:
        run: dict[str, Span] = {}
        run_key = None
        try:
            with tarfile.open(tar, "r:") as archive:
                for member in archive:
                    if not member.isfile():
                        continue
                    # webdataset's rule: a sample's key ends at the first dot of its file name
                    folder, _, name = member.name.rpartition("/")
                    key = f"{folder}/{name.partition('.')[0]}"
                    if key != run_key or member.name in run:
                        items += _tar_items(tar, run, caption_key)
                        run, run_key = {}, key
                    run[member.name] = (member.offset_data, member.size)
        except (tarfile.TarError, OSError) as error:
            items += _tar_items(tar, run, caption_key)
            found = Reject(shown(tar.name), shown(tar.name), f"damaged tar: {error}")
            items.append(found)
            continue
        items += _tar_items(tar, run, caption_key)
    return Source("webdataset", path, items, listing_fingerprint(path, tars))


def _tar_items(tar: Path, run: dict[str, Span], caption_key: str | None) -> list[Item]:
    """The pairs among adjacent members of one key.

    A picture's caption is the member named like it but for the last suffix. So names with dots
    (which webdataset would throw together under one key) keep their own captions, and a second
    picture without one (a mask, `key.seg.png`) is a field of the sample, not an input.
    """
    items: list[Item] = []
    images = [name for name in run if Path(name).suffix.lower() in IMAGE_SUFFIXES]
    for name in images:
        stem = name[: -len(Path(name).suffix)]
        text, record = run.get(f"{stem}.txt"), run.get(f"{stem}.json")
        key = shown(name)
        if record is not None and (caption_key is not None or text is None):
            items.append(TarItem(tar, key, run[name], record, caption_key or ""))
        elif text is not None:
            items.append(TarItem(tar, key, run[name], text, None))
    if images and not items:
        reason = f"no caption: no .txt or .json beside it in {shown(tar.name)}"
        items.append(Reject(shown(images[0]), shown(tar.name), reason))
    if run and not images:
        name = next(iter(run))
        items.append(Reject(shown(name), shown(tar.name), "no picture: none of the same name"))
    return items
