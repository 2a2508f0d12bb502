"""What is asked of `prepare`, and whether it can be."""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pennyclip.base.errors import RequestError
from pennyclip.data.images import MAX_SIDE
from pennyclip.data.resize import FITS
from pennyclip.data.sources import Options, Source

Request = dict[str, Any]

RANGES = {
    "shard_size": (1, 1_000_000),
    "side": (1, MAX_SIDE),
    "quality": (1, 100),
    "max_pixels": (1, 1_000_000_000),
    "raw": (8, 2048),
    "val_share": (0, 0.9),
    "dev_share": (0, 0.9),
    "near_bits": (0, 11),
}
"""Least and most. Chosen: beyond them lie slips of the finger (a raw square of 2,048 pixels takes
13 MB); above 11 near bits the search takes steeply longer (`near_pairs`)."""


def check_settings(settings: Request) -> None:
    """Raises RequestError where a setting is out of its range."""
    for name, (low, high) in RANGES.items():
        value = settings[name]
        if value is not None and not low <= value <= high:
            raise RequestError(f"{name} = {value}: expected a number from {low} to {high}.")
    if settings["fit"] not in FITS:
        raise RequestError(f"fit = {settings['fit']}: expected one of {', '.join(FITS)}.")


def check_sources(opened: Sequence[Source], folders: Sequence[Path]) -> None:
    """Whether there is anything to do, and not from a folder that is written to."""
    if not opened:
        raise RequestError("prepare needs at least one source: a folder, a table, or tars.")
    for source in opened:
        if not len(source):
            raise RequestError(f"{source.path} ({source.kind}) holds no pair at all.")
        if sum(source.path.resolve() == other.path.resolve() for other in opened) > 1:
            raise RequestError(
                f"{source.path} is given twice. To see its pairs more often, train with --weights."
            )
        if source.kind not in ("folder", "classes", "columns"):
            continue
        for folder in folders:
            if folder.resolve().is_relative_to(source.path.resolve()):
                raise RequestError(
                    f"The dataset {folder} would lie inside its own source {source.path}. "
                    "Give a folder elsewhere."
                )


def source_records(opened: Sequence[Source], options: Options) -> list[Request]:
    """What identifies each source, as it stands in the request."""
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    given = {
        name: str(value.resolve()) if isinstance(value, Path) else value
        for name, value in given.items()
        if value
    }
    return [
        {
            "path": str(source.path.resolve()),
            "kind": source.kind,
            "inputs": len(source),
            "fingerprint": source.fingerprint,
            **json.loads(json.dumps(given)),
        }
        for source in opened
    ]
