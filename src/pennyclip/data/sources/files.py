"""Files of a source: found, told apart from what is none, read within limits, and identified."""

import os
import stat
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

from pennyclip.base.errors import RequestError

IMAGE_SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".tif", ".tiff"),
        *(".webp", ".avif", ".jp2", ".ppm", ".pgm", ".heic", ".svg"),
    )
)
"""File names that claim to be a picture. What cannot be read is refused when decoding."""

MAX_TEXT = 1 << 24
"""Bytes of a text file. Chosen: a caption of 16 MB is a mistake."""
MAX_IMAGE = 1 << 30
"""Bytes of a picture's file. Chosen: above 100 megapixels of four 16-bit samples, as they are."""


def walk(folder: Path) -> Iterator[Path]:
    """Every file at any depth in sorted order, hidden ones left out; links are followed once.

    Raises:
        RequestError: a folder cannot be looked into.
    """

    def refuse(error: OSError) -> None:
        raise RequestError(
            f"{error.filename} cannot be looked into: {error.strerror}. Make it readable, or move "
            "it out of the source."
        ) from error

    visited = set()
    for where, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(where)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(where) / name


def shown(path: str | os.PathLike[str]) -> str:
    """A file's name as valid text, also where its bytes are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def read_file(path: Path, most: int) -> bytes:
    """A file's content.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file (one that waits, or never ends), or larger than `most`.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a file")
    check_size(found.st_size, most)
    return path.read_bytes()


def check_size(size: int, most: int) -> None:
    """Raises ValueError above the limit."""
    if size > most:
        raise ValueError(f"{size:,} bytes, and at most {most:,} are read")


def listing_fingerprint(root: Path, files: Iterable[Path]) -> str:
    """Identifies files by name, size and time of change, without reading them."""
    digest = blake2b(digest_size=16)
    for file in files:
        name = os.fsencode(file.relative_to(root) if file != root else file.name)
        digest.update(name + file_state(file))
    return digest.hexdigest()


def file_state(file: Path) -> bytes:
    """Size and time of change, or that there is no such file."""
    try:
        found = file.stat()
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return b"\0absent\0"
    return f"\0{found.st_size}\0{found.st_mtime_ns}\0".encode()
