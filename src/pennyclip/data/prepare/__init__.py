"""From sources to a dataset: every picture decoded once, and the same bytes every time.

    list the sources -> one task a shard, in processes -> groups and splits -> dataset.json

Whatever interrupts it, the same request goes on with the shards that are missing.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pennyclip.base.errors import RequestError, RunError
from pennyclip.data.duplicates import NEAR_BITS
from pennyclip.data.engines import Engine
from pennyclip.data.images import MAX_PIXELS
from pennyclip.data.prepare.claim import claimed, make_tasks
from pennyclip.data.prepare.finish import finish
from pennyclip.data.prepare.request import check_settings, check_sources, source_records
from pennyclip.data.prepare.summary import Summary, summarize
from pennyclip.data.prepare.work import make_shards
from pennyclip.data.resize import Fit
from pennyclip.data.shards import Form
from pennyclip.data.sources import Options, open_sources

__all__ = ["Summary", "prepare"]


def prepare(
    sources: Sequence[str | os.PathLike[str]] | str,
    out: str | os.PathLike[str],
    *,
    shard_size: int = 1000,
    workers: int | None = None,
    engine: Engine = "local",
    side: int = 256,
    fit: Fit = "shortest",
    quality: int = 90,
    max_pixels: int = MAX_PIXELS,
    raw: int | None = None,
    roots: Sequence[str | os.PathLike[str]] = (),
    val_share: float = 0.05,
    dev_share: float = 0.05,
    image_key: str | None = None,
    caption_key: str | None = None,
    templates: Sequence[str] = (),
    classes: str | os.PathLike[str] | None = None,
    append: bool = False,
    seed: int = 0,
    near_bits: int = NEAR_BITS,
    quiet: bool = False,
) -> Summary:
    """Turn sources into a dataset folder.

    The bytes written depend on the sources and the request, not on the workers. Run again after
    an interruption it goes on; run again when finished it says so and changes nothing.

    Args:
        sources: what a reader of `pennyclip.data.sources.READERS` knows, in this order.
        out: the dataset's folder.
        shard_size: inputs a shard; what is refused is missing from its shard. Chosen: 25 MB.
        workers: processes; None: one for each core that this process may use, or that Ray knows of.
        engine: "local": processes of this machine; "ray": a Ray cluster.
        side: pixels to which a larger picture's shorter side, or its square, is brought.
        fit: "shortest" keeps all of a picture; "crop" the square in its middle; "pad" all of it,
            in the middle of a white square.
        quality: of the JPEGs that are encoded.
        max_pixels: pictures with more are refused.
        raw: also keep each picture as plain pixels, exactly what evaluation at this image size
            makes of the original; None: don't.
        roots: further folders, on other disks; shards go to `out` and to these in turn.
        val_share: of the rows, held out for reports where no source brings a val split.
        dev_share: of the train rows left, held out to choose by.
        image_key: a table's column with the image paths, where its name is unusual.
        caption_key: a table's column (a tar's .json field) with the captions, likewise.
        templates: captions of class folders, with {} for the name of the class.
        classes: a JSON object from class folder to class name, where they differ.
        append: add the sources to the finished dataset in `out`. Its rows keep their numbers and
            splits; new rows that repeat them don't cross.
        seed: of the choice of val and dev.
        near_bits: of 64 in which the hashes of nearly equal pictures may differ; 0: only equal
            pictures are found.
        quiet: show no progress.

    Raises:
        RequestError: a source or argument is wrong, or `out` holds something else.
        RunError: nearly everything was refused, a shard's workers were killed time and again, or
            the disk is full.
    """
    began = time.monotonic()
    if isinstance(sources, str):
        sources = [sources]
    out = Path(out)
    settings: dict[str, Any] = {
        "shard_size": shard_size,
        "side": side,
        "fit": fit,
        "quality": quality,
        "max_pixels": max_pixels,
        "raw": raw,
        "roots": [str(Path(root).resolve()) for root in roots],
        "val_share": val_share,
        "dev_share": dev_share,
        "seed": seed,
        "near_bits": near_bits,
    }
    check_settings(settings)
    if workers is not None and workers < 1:
        raise RequestError(f"workers = {workers}: expected 1 or more.")
    options = Options(
        image_key=image_key,
        caption_key=caption_key,
        templates=tuple(templates),
        classes=Path(classes) if classes is not None else None,
    )
    opened = open_sources(sources, options)
    check_sources(opened, [out, *map(Path, settings["roots"])])
    form = Form(side=side, fit=fit, quality=quality, max_pixels=max_pixels, raw=raw)
    try:
        with claimed(out, settings, source_records(opened, options), append) as claim:
            if not claim.done:
                make_shards(make_tasks(claim, opened, form), engine, workers, quiet)
                finish(claim)
            return summarize(
                out,
                seconds=time.monotonic() - began,
                already_done=claim.done,
                appended=claim.batch or None,
            )
    except OSError as error:
        raise RunError(
            f"Writing {out} failed: {error}. What is finished is kept: run it again when the cause "
            "is gone."
        ) from error
