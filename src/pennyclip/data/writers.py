"""Files written item by item, whose bytes follow from the items alone."""

import tarfile
from hashlib import blake2b
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt


class ArrayWriter:
    """A .npy file of equal items whose number is known at the end."""

    def __init__(self, file: BinaryIO, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> None:
        self._file, self._dtype, self._shape = file, np.dtype(dtype), shape
        self._items = 0
        self._write_header()

    def add(self, items: npt.ArrayLike) -> None:
        """Append one item of the shape, or an array of several."""
        values = np.ascontiguousarray(items, self._dtype).reshape(-1, *self._shape)
        self._file.write(values.data)
        self._items += len(values)

    def close(self) -> None:
        """Write the number of items; `position` has the bytes of the whole file."""
        self.position = self._file.tell()
        self._file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        """NumPy leaves room in it, so that the number of items may grow."""
        shape = (self._items, *self._shape)
        header: dict[str, Any] = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)


class TarWriter:
    """A plain USTAR archive whose bytes follow from its members alone: no times, no owners.

    Ours because it says where each member's data start, and because webdataset's writer adds a
    PAX header to every member (5.8 KB a sample where this takes 1.7 KB).
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = 0
        self.digest = blake2b(digest_size=32)

    def add(self, name: str, data: bytes) -> int:
        """Append a member; returns the offset of its first byte of data."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self._write(member.tobuf(tarfile.USTAR_FORMAT))
        offset = self.position
        self._write(data + bytes(-len(data) % tarfile.BLOCKSIZE))
        return offset

    def close(self) -> None:
        """Write the end of the archive: two empty blocks."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.position += len(data)
