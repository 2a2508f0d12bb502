"""A prepared dataset on disk, opened for random access.

dataset.json            what it was made from and with, and what was kept
shards/000123.tar       plain USTAR: <key>.jpg and <key>.txt, one caption a line
index/000123.parquet    one row an image, for people and filters
index/rows.npy          the same in fixed width, memory-mapped: all that a loader needs
keep/NAME.parquet       subsets of row ids
"""

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from pennyclip.errors import RequestError

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
        if self.meta["schema_version"] != SCHEMA_VERSION:
            raise RequestError(
                f"{manifest}: schema version {self.meta['schema_version']}, and this pennyclip "
                f"reads {SCHEMA_VERSION}. Prepare the dataset again, or use the other version."
            )
        self.rows: npt.NDArray[np.void] = np.load(self.path / "index" / "rows.npy", mmap_mode="r")
        if self.rows.dtype != ROW:
            raise RequestError(f"{self.path}/index/rows.npy has columns {self.rows.dtype.names}")
        self._files = [os.open(self.path / s["path"], os.O_RDONLY) for s in self.meta["shards"]]

    def __len__(self) -> int:
        return len(self.rows)

    def __del__(self) -> None:
        for descriptor in getattr(self, "_files", []):
            os.close(descriptor)

    @property
    def fingerprint(self) -> str:
        """Identifies the rows: equal for byte-identical datasets."""
        return str(self.meta["fingerprint"])

    def image_bytes(self, row: int) -> bytes:
        """The row's JPEG, read by position; safe from several threads at once."""
        r = self.rows[row]
        return os.pread(self._files[r["shard"]], int(r["image_length"]), int(r["image_offset"]))

    def captions(self, row: int) -> list[str]:
        r = self.rows[row]
        text = os.pread(self._files[r["shard"]], int(r["text_length"]), int(r["text_offset"]))
        return text.decode("utf-8").split("\n")

    @cached_property
    def caption_starts(self) -> npt.NDArray[np.int64]:
        """[rows + 1]: captions of row r are numbered starts[r] to starts[r + 1] - 1."""
        return np.concatenate([[0], np.cumsum(self.rows["captions"], dtype=np.int64)])

    def subsets(self) -> list[str]:
        return sorted(path.stem for path in (self.path / "keep").glob("*.parquet"))

    def subset(self, name: str) -> npt.NDArray[np.int64]:
        """Row ids of a split or filter, ascending.

        Raises:
            RequestError: there is no such subset; those that exist are named.
        """
        file = self.path / "keep" / f"{name}.parquet"
        if not file.is_file():
            raise RequestError(
                f"{self.path} has no subset '{name}'. It has: {', '.join(self.subsets())}."
            )
        return pq.read_table(file, columns=["row"])["row"].to_numpy().astype(np.int64)

    def keys(self, rows: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
        """The index entries (key, origin, captions, sizes) of some rows, for people to read."""
        wanted: dict[int, dict[str, Any]] = {}
        starts = np.concatenate([[0], np.cumsum([s["rows"] for s in self.meta["shards"]])])
        for shard in np.unique(self.rows["shard"][rows]):
            entry = self.meta["shards"][int(shard)]
            table = pq.read_table(self.path / "index" / f"{Path(entry['path']).stem}.parquet")
            inside = rows[self.rows["shard"][rows] == shard]
            for row, item in zip(
                inside.tolist(), table.take(inside - starts[shard]).to_pylist(), strict=True
            ):
                wanted[row] = item
        return [wanted[row] for row in rows.tolist()]
