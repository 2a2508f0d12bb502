"""Files that are either whole or not there (temporary name, flush, rename), and who may write."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def flush(path: Path) -> None:
    """Push a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """A temporary path beside `final`, for a file or a folder, that becomes `final` at the end.

    What fails or is killed in between leaves `final` as it was. Where another process makes the
    same folder at the same time, the first to finish it wins.
    """
    partial = final.parent / f".{final.name}.{os.getpid()}.tmp"
    final.parent.mkdir(parents=True, exist_ok=True)
    remove(partial)
    try:
        yield partial
        for path in [*partial.rglob("*"), partial] if partial.is_dir() else [partial]:
            flush(path)
        if final.is_dir():
            remove(partial)
        else:
            os.replace(partial, final)
        flush(final.parent)
    except BaseException:
        remove(partial)
        raise


def partials(folder: Path) -> list[Path]:
    """Temporary paths that killed processes left in a folder."""
    return list(folder.glob(".*.tmp"))


def write_text(final: Path, text: str) -> None:
    with replacing(final) as partial:
        partial.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there. A folder is never seen with some of it gone."""
    if path.is_dir():
        going = path if path.name.endswith(".tmp") else path.parent / f".{path.name}.tmp"
        os.replace(path, going)
        shutil.rmtree(going)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, kind: int) -> Iterator[None]:
    """Hold an advisory lock on a folder; on file systems without locks, nothing.

    Raises:
        BlockingIOError: somebody else holds it, and `kind` says not to wait.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, kind)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        os.close(descriptor)
