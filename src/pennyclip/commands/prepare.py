"""`pennyclip prepare`: a dataset, and the page about it."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from pennyclip.commands.answer import Answer, Json


@dataclass(frozen=True)
class Prepare:
    """Any layout of image-text pairs -> validated, resized, sharded dataset."""

    sources: Positional[tuple[str, ...]]
    """Folders, tables, tars: docs/your-data.md lists what is recognised."""
    out: Path
    """The dataset's folder."""
    append: bool = False
    """Add the sources to the finished dataset in --out; its rows keep their numbers and splits."""
    image_key: str | None = None
    """A table's column with the images, where its name is unusual."""
    caption_key: str | None = None
    """A table's column with the captions, where its name is unusual."""
    templates: tuple[str, ...] = ()
    """Captions for class folders: "a photo of a {}"."""
    classes: Path | None = None
    """JSON object from class folder to class name, where they differ."""
    side: int = 256
    """Pixels to which a larger picture's shorter side, or its square, is brought."""
    fit: Literal["shortest", "crop", "pad"] = "shortest"
    """Keep all of a picture, its middle square, or all of it in a white square."""
    max_pixels: int = 100_000_000
    """Pictures with more are refused by their header."""
    raw: int | None = None
    """Also keep plain pixels for evaluation and fast training at this image size, exactly as CLIP's
    preprocessing makes them of the originals."""
    roots: tuple[Path, ...] = ()
    """Folders on other disks; shards go to --out and to these in turn."""
    val_share: float = 0.05
    """Share of rows held out for reports, where the source brings no validation split."""
    dev_share: float = 0.05
    """Share of training rows held out to choose checkpoints by."""
    near_bits: int = 6
    """Of 64, in which the hashes of nearly equal pictures may differ; 0: only equal ones count."""
    workers: int | None = None
    """Processes; unset: one a core."""
    engine: Literal["local", "ray"] = "local"
    """Who does the work: processes of this machine, or a Ray cluster (docs/several-machines.md)."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.data.prepare import prepare
        from pennyclip.reporting import write_dataset_page

        options = {k: v for k, v in vars(self).items() if k not in ("sources", "out", "json")}
        try:
            summary = prepare(self.sources, self.out, **options)
        except KeyboardInterrupt:
            print("Stopped. What is finished is kept: run it again to go on.", file=sys.stderr)
            raise
        page = self.out / "report.html"
        if not (summary.already_done and page.is_file()):
            write_dataset_page(self.out)
        tree = dataclasses.asdict(summary) | {"report": str(page)}
        return Answer(f"{summary}\n  look at it {page}", tree)
