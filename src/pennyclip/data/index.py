"""A prepared dataset on disk, opened for random access.

dataset.json            what it was made from and with, and what was kept
shards/000123.tar       plain USTAR: <key>.jpg and <key>.txt, one caption a line
index/000123.parquet    one row an image, for people and filters
index/rows.npy          the same in fixed width, memory-mapped: all that a loader needs
keep/NAME.parquet       subsets of row ids
raw/000123.npy          optional: uint8 [rows, side, side, 3]

Shards and raw squares may lie in several roots, on several disks; the rest is in the first.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pennyclip.base.errors import RequestError
from pennyclip.data.images import decode_jpeg
from pennyclip.data.order import I64

SCHEMA_VERSION = 1

ROW = np.dtype(
    [
        ("shard", "<u4"),  # position in dataset.json's list of shards
        ("image_offset", "<u8"),  # bytes from the start of the tar to the JPEG's first byte
        ("image_length", "<u4"),
        ("text_offset", "<u8"),
        ("text_length", "<u4"),
        ("captions", "<u2"),  # how many captions, so lines in the text member
        ("group", "<u8"),  # rows of one group are never each other's negatives
    ]
)


OPEN_SHARDS = 256  # files open at a time. chosen: a process may usually have 1,024
BLOCK = 1 << 16  # rows gone through at a time. chosen: half a megabyte of 64-bit numbers


class Dataset:
    """A dataset folder written by `pennyclip prepare`. A row is one image with its captions."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        manifest = self.path / "dataset.json"
        if not manifest.is_file():
            raise RequestError(
                f"{self.path} is not a finished dataset: it has no dataset.json. "
                "Make one (or let it finish) with: pennyclip prepare SOURCE --out " + str(self.path)
            )
        self.meta: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))
        if self.meta.get("schema_version") != SCHEMA_VERSION:
            raise RequestError(
                f"{manifest}: schema version {self.meta.get('schema_version')}, and this pennyclip "
                f"reads {SCHEMA_VERSION}. Prepare the dataset again, or use the other version."
            )
        # While sources are being appended, there may be more rows than count already.
        rows = np.load(self.path / "index" / "rows.npy", mmap_mode="r")
        self.rows: npt.NDArray[np.void] = rows[: self.meta["counts"]["kept"]]
        if self.rows.dtype != ROW:
            raise RequestError(
                f"{self.path}/index/rows.npy: expected rows of {ROW}, found {rows.dtype}. "
                "Prepare the dataset again."
            )
        files = [file for number in range(len(self.meta["shards"])) for file in self._sizes(number)]
        missing = [file for file, size in files if _size(file) != size]
        if missing:
            found = _size(missing[0])
            what = "absent" if found is None else f"of another size, {found:,} bytes"
            raise RequestError(
                f"{self.path} lacks {len(missing)} of its {len(files)} shard files ({missing[0]} "
                f"is {what}). Bring them back, or remove the folder and prepare it again. Where a "
                f"folder of --roots has moved, correct it under 'roots' in {manifest}."
            )
        self._shard = lru_cache(OPEN_SHARDS)(self._open_shard)
        self._raw = lru_cache(OPEN_SHARDS)(self._open_raw)
        self.raw_side: int | None = self.meta["preprocess"].get("raw")
        """Pixels of the squares kept beside the JPEGs, if there are any."""
        counts = [shard["rows"] for shard in self.meta["shards"]]
        self.shard_starts: I64 = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        """[shards + 1] the first row of each shard."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """Identifies the rows: equal for byte-identical datasets."""
        return str(self.meta["fingerprint"])

    def shard_path(self, number: int) -> Path:
        """Where a shard's tar is: in the dataset's own folder, or on another disk."""
        shard = self.meta["shards"][number]
        return self.path / self.meta.get("roots", ["."])[shard.get("root", 0)] / shard["path"]

    def index_path(self, number: int) -> Path:
        """Where the table of a shard's rows is."""
        stem = Path(self.meta["shards"][number]["path"]).stem
        return self.path / "index" / f"{stem}.parquet"

    def _raw_path(self, number: int) -> Path:
        tar = self.shard_path(number)
        return tar.parent.parent / "raw" / f"{tar.stem}.npy"

    def _sizes(self, number: int) -> Iterator[tuple[Path, int]]:
        """A shard's files and their bytes."""
        shard = self.meta["shards"][number]
        yield self.shard_path(number), shard["bytes"]
        if "raw_bytes" in shard:
            yield self._raw_path(number), shard["raw_bytes"]

    def pixels(self, row: int, side: int) -> npt.NDArray[np.uint8]:
        """[H, W, 3] the row's picture, for use at `side` pixels; safe from several threads.

        The plain square that was kept, where it is large enough: at its own side, it is exactly
        what evaluation makes of the original. Otherwise the decoded JPEG.

        Raises:
            OSError: it cannot be read.
            ValueError: it cannot be decoded.
        """
        if self.raw_side is None or side > self.raw_side:
            return decode_jpeg(self.image_bytes(row))
        shard = int(self.rows[row]["shard"])
        return self._raw(shard)[row - self.shard_starts[shard]]

    def image_bytes(self, row: int) -> bytes:
        """The row's JPEG, read by position; safe from several threads at once."""
        return self._read(row, "image")

    def captions(self, row: int) -> list[str]:
        return self._read(row, "text").decode("utf-8").split("\n")

    def _read(self, row: int, member: str) -> bytes:
        r = self.rows[row]
        length, offset = int(r[f"{member}_length"]), int(r[f"{member}_offset"])
        return self._shard(int(r["shard"])).read(length, offset)

    def _open_shard(self, number: int) -> "_Shard":
        return _Shard(self.shard_path(number))

    def _open_raw(self, number: int) -> npt.NDArray[np.uint8]:
        return np.load(self._raw_path(number), mmap_mode="c")

    @cached_property
    def caption_starts(self) -> I64:
        """[rows + 1]: captions of row r are numbered starts[r] to starts[r + 1] - 1."""

        def starts() -> Iterable[I64]:
            last = np.zeros(1, np.int64)
            yield last
            for first in range(0, len(self), BLOCK):
                counts = self.rows["captions"][first : first + BLOCK]
                yield (ends := last[-1] + counts.cumsum(dtype=np.int64))
                last = ends

        return _mapped(starts())

    def subsets(self) -> list[str]:
        return sorted(path.stem for path in (self.path / "keep").glob("*.parquet"))

    def subset(self, name: str) -> I64:
        """Row ids of a split or filter, ascending.

        Raises:
            RequestError: there is no such subset; those that exist are named.
        """
        file = self.path / "keep" / f"{name}.parquet"
        if not file.is_file():
            raise RequestError(
                f"{self.path} has no subset '{name}'. It has: {', '.join(self.subsets())}."
            )
        parts = pq.ParquetFile(file).iter_batches(BLOCK, columns=["row"], use_threads=False)
        ids = (part["row"].to_numpy() for part in parts)
        rows = _mapped(some[some < len(self)] for some in ids)
        pa.default_memory_pool().release_unused()  # or Arrow would keep it for its next table
        return rows

    def table(self, *columns: str) -> pa.Table:
        """Columns of the index, all rows."""
        files = map(self.index_path, range(len(self.meta["shards"])))
        return pa.concat_tables([pq.read_table(file, columns=list(columns)) for file in files])

    def picture(self, entry: dict[str, Any]) -> str:
        """Where the picture of an entry of `keys` came from: its file, or its name in the source.

        A table's `origin` says in which line it stands; this says which picture that names.
        """
        name, sources = str(entry["source_key"]), self.meta.get("sources", [])
        if entry["source"] < len(sources):
            source = Path(sources[entry["source"]]["path"])
            file = (source if source.is_dir() else source.parent) / name
            if file.is_file():
                return str(file)
        return name

    def keys(self, rows: I64) -> list[dict[str, Any]]:
        """The index entries (key, origin, captions, sizes) of some rows, for people to read."""
        wanted: dict[int, dict[str, Any]] = {}
        shards = self.rows["shard"][rows]
        for shard in np.unique(shards).tolist():
            inside = rows[shards == shard]
            table = pq.read_table(self.index_path(shard))
            entries = table.take(inside - self.shard_starts[shard]).to_pylist()
            wanted |= zip(inside.tolist(), entries, strict=True)
        return [wanted[row] for row in rows.tolist()]


def _size(file: Path) -> int | None:
    """Bytes of a file; None where there is none."""
    return file.stat().st_size if file.is_file() else None


class _Shard:
    """An open shard: closed when nobody reads from it any more."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, length: int, offset: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


def _mapped(parts: Iterable[npt.NDArray[Any]]) -> I64:
    """The parts of a long array one after the other, in a file without a name.

    Its pages come and go as the system has room, so that no process grows with the dataset.
    """
    with tempfile.TemporaryFile() as file:
        length = 0
        for part in parts:
            file.write(part.astype(np.int64).tobytes())
            length += len(part)
        file.flush()
        if length == 0:
            return np.empty(0, np.int64)
        return np.asarray(np.memmap(file, np.int64, "c", shape=(length,)))
