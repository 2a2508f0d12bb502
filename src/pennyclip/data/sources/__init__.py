"""Where pairs come from: what lies on disk is recognised and listed, and read pair by pair.

A source is a sequence of items that can be pickled, each of which reads its own pair, so that any
process can take any slice; nothing but the listing is held. A new layout is a file with its
`Reader`, and an entry in `READERS`.
"""

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from pennyclip.base.errors import RequestError
from pennyclip.data.sources.classes import CLASSES
from pennyclip.data.sources.coco import COCO
from pennyclip.data.sources.columns import COLUMNS
from pennyclip.data.sources.files import walk
from pennyclip.data.sources.folders import FOLDER
from pennyclip.data.sources.pairs import Item, Options, Pair, Reader, Reject, Source
from pennyclip.data.sources.saved import SAVED
from pennyclip.data.sources.tables import LONE_TABLE, TABLE
from pennyclip.data.sources.tars import TARS

__all__ = ["Item", "Options", "Pair", "Reject", "Source", "open_source", "open_sources"]

READERS: dict[str, Reader] = {
    "datasets": SAVED,
    "coco": COCO,
    "table": TABLE,
    "webdataset": TARS,
    "folder": FOLDER,
    "lone table": LONE_TABLE,
    "columns": COLUMNS,
    "classes": CLASSES,
}
"""The first that knows what is there reads it: the narrower a layout, the earlier."""


def open_source(
    path: str | os.PathLike[str],
    *,
    image_key: str | None = None,
    caption_key: str | None = None,
    templates: tuple[str, ...] = (),
    classes: Path | None = None,
) -> Source:
    """One source: see `open_sources` and `Options`."""
    options = Options(
        image_key=image_key, caption_key=caption_key, templates=templates, classes=classes
    )
    return open_sources([path], options)[0]


def open_sources(paths: Sequence[str | os.PathLike[str]], options: Options) -> list[Source]:
    """Recognise sources by what is on disk (see `READERS`), and list them.

    A text file (and a tar's .txt) holds one caption a line. Elsewhere a run of line breaks inside
    a caption becomes one space; NULs are removed; everything else stays as it is written. A
    caption of nothing but white space is none.

    Raises:
        RequestError: nothing is there, no reader knows it, or an option says nothing to any.
    """
    sources, used = [], set()
    for path in paths:
        source, reader = _open(Path(path), options)
        sources.append(source)
        used |= set(reader.uses)
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default and field.name not in used:
            flag = field.name.replace("_", "-")
            kinds = " and ".join(f"{source.path} ({source.kind})" for source in sources)
            users = [name for name, reader in READERS.items() if field.name in reader.uses]
            raise RequestError(
                f"--{flag} {value} means nothing to {kinds}: it is for {', '.join(users)}. "
                "Leave it out."
            )
    return sources


def _open(path: Path, options: Options) -> tuple[Source, Reader]:
    if not path.exists():
        raise RequestError(f"The source {path} doesn't exist (looked from {Path.cwd()}).")
    for reader in READERS.values():
        source = reader.open(path, options)
        if source is not None:
            return source, reader
    expected = "\n".join(f"  {name:<11} {reader.expects}" for name, reader in READERS.items())
    raise RequestError(
        f"{path} is no source that prepare knows: {_seen(path)}. Expected one of:\n{expected}"
    )


def _seen(path: Path) -> str:
    if path.is_file():
        with path.open("rb") as opened:
            return f"a file ending in '{path.suffix}', starting with {opened.read(12)!r}"
    counts: dict[str, int] = {}
    for file in walk(path):
        suffix = file.suffix.lower() or "no suffix"
        counts[suffix] = counts.get(suffix, 0) + 1
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:6]
    files = ", ".join(f"{count} x {suffix}" for suffix, count in common)
    return f"a folder holding {files}" if files else "an empty folder"
