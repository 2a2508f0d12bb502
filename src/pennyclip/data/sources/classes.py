"""Folders of pictures, a folder a class; captions are made from templates."""

import json
from dataclasses import dataclass
from pathlib import Path

from pennyclip.base.errors import RequestError
from pennyclip.data.sources.files import IMAGE_SUFFIXES, listing_fingerprint, shown, walk
from pennyclip.data.sources.pairs import (
    SPLITS,
    Item,
    Options,
    Pair,
    Reader,
    Reject,
    Source,
    pair_or_reject,
)


@dataclass(frozen=True)
class ClassItem:
    image: Path
    key: str
    captions: tuple[str, ...]
    label: str
    split: str | None

    def read(self) -> Pair | Reject:
        return pair_or_reject(
            self.key, self.key, self.image, self.captions, None, self.split, self.label
        )


def open_classes(path: Path, options: Options) -> Source | None:
    """PATH/CLASS/... or PATH/SPLIT/CLASS/..., pictures at any depth below.

    Only where templates are given: that a folder's name says what its pictures show, people have
    to say. A class is called as its folder, with spaces for underscores and hyphens, or as
    `options.classes` says.
    """
    if not path.is_dir() or not options.templates:
        return None
    for template in options.templates:
        if "{}" not in template:
            raise RequestError(f"--templates '{template}': no {{}} for the name of the class.")
    images = [file for file in walk(path) if file.suffix.lower() in IMAGE_SUFFIXES]
    parts = [file.relative_to(path).parts for file in images]
    tops = {part[0] for part in parts if len(part) > 1}
    by_split = bool(tops) and all(top.lower() in SPLITS for top in tops)
    names = _names(options.classes)
    items: list[Item] = []
    used: list[Path] = []
    unnamed = []
    for file, part in zip(images, parts, strict=True):
        key = shown(file.relative_to(path))
        if len(part) < 2 + by_split:
            items.append(Reject(key, key, "no class: it lies in no class's folder"))
            continue
        folder = shown(part[by_split])
        if names is not None and folder not in names:
            unnamed.append(folder)
            continue
        name = names[folder] if names is not None else folder.replace("_", " ").replace("-", " ")
        name = " ".join(name.split())
        captions = tuple(template.replace("{}", name) for template in options.templates)
        split = SPLITS[part[0].lower()] if by_split else None
        items.append(ClassItem(file, key, captions, name, split))
        used.append(file)
    if unnamed:
        raise RequestError(
            f"{options.classes} names no class for the folder '{unnamed[0]}' (and for "
            f"{len(set(unnamed)) - 1} others) in {path}. Add it there."
        )
    return Source("classes", path, items, listing_fingerprint(path, used)) if used else None


def _names(file: Path | None) -> dict[str, str] | None:
    if file is None:
        return None
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"--classes {file} can't be read as JSON: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(n, str) and n for n in names.values()):
        raise RequestError(
            f"--classes {file}: expected one JSON object of folder and class name, such as "
            f'{{"n02084071": "dog"}}, found {str(names)[:60]}.'
        )
    return names


CLASSES = Reader(
    "a folder with one folder of pictures a class (or train/, val/ and test/ with those), and "
    "--templates 'a photo of a {}' for the captions",
    ("templates", "classes"),
    open_classes,
)
