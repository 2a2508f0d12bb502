"""One shard: a fixed slice of the sources, decoded, resized, and written as a tar with its index.

A task depends on nothing but its slice, so any process may do it, again if need be, with the same
bytes. Its manifest is written last: a shard that has one is done.
"""

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageFile

from pennyclip.base.atomic import locked, replacing, write_text
from pennyclip.data import hashes, images
from pennyclip.data.resize import Fit, centre_square, fit_to
from pennyclip.data.sources.files import MAX_IMAGE, read_file, shown
from pennyclip.data.sources.pairs import Item, Pair, Reject
from pennyclip.data.writers import ArrayWriter, TarWriter

INDEX = pa.schema(
    [
        ("key", pa.string()),  # name inside the shard: the running number of the input
        ("source", pa.int32()),  # position in dataset.json's list of sources
        ("source_key", pa.string()),  # the picture's name inside the source
        ("origin", pa.string()),  # where its record stands: file, and line of a table
        ("captions", pa.list_(pa.string())),
        ("group", pa.string()),  # the source's, if it has one
        ("label", pa.string()),  # the picture's class, where captions are made from it
        ("split", pa.string()),  # the source's, if it has one
        ("width", pa.int32()),  # of the picture as it came, upright
        ("height", pa.int32()),
        ("bytes", pa.int64()),
        ("stored_width", pa.int32()),
        ("stored_height", pa.int32()),
        ("reencoded", pa.bool_()),
        ("pixel_hash", pa.binary(16)),  # of the stored size, before JPEG
        ("phash", pa.uint64()),
        ("fine_hash", pa.binary(32)),  # of four times the frequencies
        ("image_offset", pa.int64()),
        ("image_length", pa.int64()),
        ("text_offset", pa.int64()),
        ("text_length", pa.int64()),
    ]
)

REPORT_EVERY = 16  # inputs between two reports of progress. chosen: a few a second


@dataclass(frozen=True)
class Form:
    """What becomes of every picture of a dataset."""

    side: int
    """Pixels of the shorter side, or of the square, of a picture that is larger."""
    fit: Fit
    quality: int
    """Of the JPEGs that are encoded, 1 to 100."""
    max_pixels: int
    """Larger pictures are refused."""
    raw: int | None
    """Side in pixels of the squares kept beside the JPEGs, as plain pixels; None: none."""


@dataclass(frozen=True)
class ShardTask:
    """Items `first` .. `first + len(items) - 1` of all sources, and what to make of them."""

    out: Path
    root: Path
    """Where the shard goes: `out`, or a folder on another disk."""
    number: int
    first: int
    items: list[tuple[int, Item]]
    """Source number and item."""
    form: Form

    def __str__(self) -> str:
        return f"shard {self.name} (inputs {self.first} to {self.first + len(self.items) - 1})"

    @property
    def name(self) -> str:
        return f"{self.number:06d}"

    @property
    def manifest(self) -> Path:
        return self.out / "index" / f"{self.name}.json"

    @property
    def index(self) -> Path:
        return self.out / "index" / f"{self.name}.parquet"

    @property
    def tar(self) -> Path:
        return self.root / "shards" / f"{self.name}.tar"

    @property
    def raw(self) -> Path:
        """uint8 [rows, side, side, 3]."""
        return self.root / "raw" / f"{self.name}.npy"

    def made(self) -> dict[str, Any] | None:
        """The finished shard's manifest, or None where there is something to do."""
        if not self.manifest.is_file():
            return None
        manifest: dict[str, Any] = json.loads(self.manifest.read_text(encoding="utf-8"))
        sizes = {self.tar: manifest["bytes"]}
        if self.form.raw is not None:
            sizes[self.raw] = manifest["raw_bytes"]
        whole = all(f.is_file() and f.stat().st_size == size for f, size in sizes.items())
        return manifest if whole else None


def make_shard(task: ShardTask, report: Callable[[int], None]) -> dict[str, Any]:
    """Write a shard's tar and index, and return its manifest.

    Args:
        task: what to make.
        report: called now and then with the number of inputs done since the last call.
    """
    import torch  # here, for the processes that do the work

    torch.set_num_threads(1)  # one process a core: threads inside would only wait for each other
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # whatever else was imported
    Image.MAX_IMAGE_PIXELS = task.form.max_pixels  # Pillow refuses what has twice as many
    rows: list[dict[str, Any]] = []
    rejects: list[dict[str, Any]] = []
    # A new run waits for this lock until the workers of a killed one have noticed and gone.
    with locked(task.out / "shards", fcntl.LOCK_SH):
        with ExitStack() as files:
            tar = TarWriter(files.enter_context(_writing(task.tar)))
            raw = None
            if task.form.raw is not None:
                shape = (task.form.raw, task.form.raw, 3)
                raw = ArrayWriter(files.enter_context(_writing(task.raw)), np.uint8, shape)
            for position, (source, item) in enumerate(task.items):
                made = _make_row(task, f"{task.first + position:09d}", source, item, tar, raw)
                if isinstance(made, Reject):
                    rejects.append({"source": source, **vars(made)})
                else:
                    rows.append(made)
                if (position + 1) % REPORT_EVERY == 0:
                    report(REPORT_EVERY)
            tar.close()
            if raw is not None:
                raw.close()
        with replacing(task.index) as partial:
            pq.write_table(pa.Table.from_pylist(rows, INDEX), partial)
        manifest = {
            "inputs": len(task.items),
            "rows": len(rows),
            "bytes": tar.position,
            "blake2b": tar.digest.hexdigest(),
            **({"raw_bytes": raw.position} if raw is not None else {}),
            "rejects": rejects,
        }
        write_text(task.manifest, json.dumps(manifest, ensure_ascii=False, indent=1) + "\n")
    report(len(task.items) % REPORT_EVERY)
    return manifest


def _make_row(
    task: ShardTask,
    key: str,
    source: int,
    item: Item,
    tar: TarWriter,
    raw: ArrayWriter | None,
) -> dict[str, Any] | Reject:
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        raise SystemExit(1)  # nobody waits for this shard any more
    pair = item.read()
    if isinstance(pair, Reject):
        return pair
    try:
        data = _read(pair)
        decoded = images.decode(data, task.form.max_pixels)
        pixels = fit_to(decoded.pixels, task.form.side, task.form.fit)
        reencode = decoded.reencode or pixels is not decoded.pixels
        pixels = images.to_srgb(pixels, decoded.profile)
        quality = task.form.quality
        jpeg = images.encode_jpeg(pixels, quality) if reencode else images.strip_metadata(data)
    except images.ImageError as error:
        return Reject(pair.key, pair.origin, str(error))
    if raw is not None:
        raw.add(images.to_srgb(_square(decoded.pixels, task.form), decoded.profile))
    text = "\n".join(pair.captions).encode()
    return {
        "key": key,
        "source": source,
        "source_key": pair.key,
        "origin": pair.origin,
        "captions": pair.captions,
        "group": pair.group,
        "label": pair.label,
        "split": pair.split,
        "width": decoded.pixels.shape[1],
        "height": decoded.pixels.shape[0],
        "bytes": len(data),
        "stored_width": pixels.shape[1],
        "stored_height": pixels.shape[0],
        "reencoded": reencode,
        "pixel_hash": hashes.pixel_hash(pixels),
        "phash": hashes.phash(pixels),
        "fine_hash": hashes.fine_hash(pixels),
        "image_offset": tar.add(f"{key}.jpg", jpeg),
        "image_length": len(jpeg),
        "text_offset": tar.add(f"{key}.txt", text),
        "text_length": len(text),
    }


def _read(pair: Pair) -> bytes:
    if isinstance(pair.image, bytes):
        return pair.image
    try:
        return read_file(pair.image, MAX_IMAGE)
    except FileNotFoundError:
        raise images.ImageError(f"no such file: {shown(pair.image)}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = error.strerror if isinstance(error, OSError) else error
        raise images.ImageError(f"unreadable: {why}: {shown(pair.image)}") from None


def _square(pixels: images.U8, form: Form) -> images.U8:
    """[raw, raw, 3] what evaluation would make of the original."""
    assert form.raw is not None
    if form.fit == "pad":
        pixels = fit_to(pixels, form.raw, "pad")
    return centre_square(pixels, form.raw)


@contextmanager
def _writing(final: Path) -> Iterator[BinaryIO]:
    with replacing(final) as partial, partial.open("w+b") as file:
        try:
            yield file
        except OSError as error:
            error.filename = error.filename or str(final)  # which disk is full
            raise
