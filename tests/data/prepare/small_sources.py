"""Small sources, and what became of them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from pennyclip.data.prepare import Summary, prepare


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def write_table(folder: Path, count: int, size: tuple[int, int] = (40, 30)) -> Path:
    """`count` pictures and a jsonl table of them, with distinct captions."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "captions.jsonl").open("w") as table:
        for i in range(count):
            picture(i, size).save(folder / f"{i}.jpg", quality=95)
            table.write(json.dumps({"image": f"{i}.jpg", "captions": [f"number {i}"]}) + "\n")
    return folder / "captions.jsonl"


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def rejects(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "rejects.jsonl").read_text("utf-8").splitlines()]


def run(*sources: Path, out: Path, **options: object) -> Summary:
    return prepare([*sources], out, **{"workers": 2, "quiet": True} | options)  # type: ignore[arg-type]
