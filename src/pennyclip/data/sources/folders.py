"""Folders of pictures, each beside a text file of the same stem."""

from dataclasses import dataclass
from pathlib import Path

from pennyclip.data.sources.files import (
    IMAGE_SUFFIXES,
    MAX_TEXT,
    listing_fingerprint,
    read_file,
    shown,
    walk,
)
from pennyclip.data.sources.pairs import (
    Item,
    Options,
    Pair,
    Reader,
    Reject,
    Source,
    caption_lines,
    pair_or_reject,
)


@dataclass(frozen=True)
class FolderItem:
    image: Path
    text: Path
    key: str

    def read(self) -> Pair | Reject:
        try:
            captions = caption_lines(read_file(self.text, MAX_TEXT))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return Reject(self.key, self.key, f"bad caption: {shown(self.text.name)}: {reason}")
        return pair_or_reject(self.key, self.key, self.image, captions)


def open_folder(path: Path, options: Options) -> Source | None:
    """The pictures at any depth that have a text file; those without become rejects."""
    if not path.is_dir():
        return None
    files = list(walk(path))
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


FOLDER = Reader(
    "a folder of pictures, each with a .txt of the same name beside it", (), open_folder
)
