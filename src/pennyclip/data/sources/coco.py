"""COCO's captions: one json with images and annotations, the pictures in a folder nearby.

The format: "Image Captioning" on the data format page of COCO's site.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pennyclip.base.errors import RequestError
from pennyclip.data.sources.files import shown
from pennyclip.data.sources.pairs import SPLITS, Item, Options, Reader, Reject, Source, load_json
from pennyclip.data.sources.rows import TableItem, fingerprint

LOOKED_AT = 100  # pictures by which their folder is found. chosen: some may be missing


def open_coco(path: Path, options: Options) -> Source | None:
    """One captions json; or a folder that holds `annotations/captions_*.json`, or those alone.

    A file called captions_train2017.json, captions_val2017.json and the like says the split.

    Raises:
        RequestError: no captions in the annotations, or the pictures' folder is not found.
    """
    files = [path]
    if path.is_dir():
        files = sorted([*path.glob("annotations/captions_*.json"), *path.glob("captions_*.json")])
    elif path.suffix.lower() != ".json":
        return None
    documents = [(file, file.read_bytes()) for file in files]
    parsed = [(file, _parse(file, data)) for file, data in documents]
    if not parsed or not all(_is_coco(tree) for _, tree in parsed):
        return None
    items: list[Item] = []
    for file, tree in parsed:
        items += _items(file, tree)
    digest = fingerprint([data for _, data in documents], items)
    return Source("coco", path, items, digest)


def _parse(file: Path, data: bytes) -> Any:
    try:
        return load_json(data)
    except ValueError as error:
        raise RequestError(f"{file}: not valid JSON: {error}") from None


def _is_coco(tree: Any) -> bool:
    return isinstance(tree, dict) and all(
        isinstance(tree.get(name), list) for name in ("images", "annotations")
    )


def _items(file: Path, tree: dict[str, Any]) -> Iterator[Item]:
    name = shown(file.name)
    images = [
        record
        for record in tree["images"]
        if isinstance(record, dict)
        and all(isinstance(record.get(name), str) for name in ("id", "file_name"))
    ]
    if len(images) < len(tree["images"]) or not images:
        others = len(tree["images"]) - len(images)
        raise RequestError(
            f"{file}: expected images, each with a number or string as 'id' and its 'file_name'; "
            f"{others} of {len(tree['images'])} are none. Correct or remove them."
        )
    if not any("caption" in one for one in tree["annotations"] if isinstance(one, dict)):
        raise RequestError(
            f"{file}: its annotations have no 'caption'. Give COCO's captions_*.json, not its "
            "instances or keypoints."
        )
    stem = file.stem.removeprefix("captions_")
    root = _root(file, stem, [record["file_name"] for record in images])
    split = SPLITS.get(stem.rstrip("0123456789_-").lower())
    found: dict[str, TableItem] = {}
    rejects: list[Item] = []
    for record in images:
        key, origin = record["file_name"], f"{name}: image {record['id']}"
        if record["id"] in found:
            rejects.append(Reject(key, origin, "bad image: another one has the same id"))
        else:
            found[record["id"]] = TableItem(root, key, origin, None, split)
    for number, one in enumerate(tree["annotations"]):
        image = one.get("image_id") if isinstance(one, dict) else None
        item = found.get(image) if isinstance(image, str) else None
        caption = one.get("caption") if item is not None else None
        if item is None or not isinstance(caption, str):
            why = "no such image" if item is None else "no caption"
            rejects.append(Reject("", f"{name}: annotation {number}", f"bad annotation: {why}"))
        else:
            item.captions.append(caption)
    yield from found.values()
    yield from rejects


def _root(file: Path, stem: str, names: list[str]) -> Path:
    folders = [
        above / below
        for above in (file.parent, file.parent.parent)
        for below in (stem, f"images/{stem}", "images", "")
    ]
    for folder in folders:
        if any((folder / name).is_file() for name in names[:LOOKED_AT] if "\0" not in name):
            return folder
    raise RequestError(
        f"{file}: none of its first {min(len(names), LOOKED_AT)} pictures (the first: {names[0]}) "
        f"is in any of {', '.join(map(str, folders))}. Put or link their folder there."
    )


COCO = Reader(
    "COCO's captions_*.json, or a folder with annotations/captions_*.json; pictures nearby",
    (),
    open_coco,
)
