"""Photographs of a given size, cut out of larger ones."""

import io
import random
from pathlib import Path

from PIL import Image

FOLDERS = ("/usr/share/backgrounds", "/usr/share/wallpapers")  # Debian's packages of wallpapers
HINT = (
    "name a folder of large photographs with --photographs, or install some: Debian's "
    "mate-backgrounds puts a dozen under /usr/share/backgrounds/mate/nature"
)


def find_photographs(folder: Path | None) -> list[Path]:
    folders = [Path(name) for name in FOLDERS] if folder is None else [folder]
    return sorted(path for one in folders for path in one.rglob("*.jp*g"))


def photographs(files: list[Path], width: int, height: int, count: int) -> list[bytes]:
    """JPEGs of quality 90: from each file in turn another part of the picture, scaled down.

    Files that are smaller than asked are passed over.
    """
    draw = random.Random(0)
    large = [file for file in files if _at_least(file, width, height)]
    if not large:
        return []
    made = []
    for number in range(count):
        with Image.open(large[number % len(large)]) as image:
            picture = image.convert("RGB")
        scale = draw.uniform(1, min(picture.width / width, picture.height / height))
        wide, high = int(scale * width), int(scale * height)
        left, top = draw.randint(0, picture.width - wide), draw.randint(0, picture.height - high)
        part = picture.crop((left, top, left + wide, top + high)).resize((width, height))
        out = io.BytesIO()
        part.save(out, "JPEG", quality=90)
        made.append(out.getvalue())
    return made


def _at_least(file: Path, width: int, height: int) -> bool:
    with Image.open(file) as image:
        return image.width >= width and image.height >= height
