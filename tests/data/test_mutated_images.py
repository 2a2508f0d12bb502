"""Mutated picture files: refused or decoded, without a crash, a hang, or memory above a bound.

Each file's mutations are decoded in a process of its own, whose memory and time are limited.
"""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

MUTATIONS = 500  # of each of 20 files: 10,000 in the full suite
FEW = 6  # in the quick one
MEMORY = 1 << 30  # bytes of the process, of which it takes about a third to begin with
SECONDS = 10  # CPU seconds that one decoding may take

CHILD = """
import random, resource, signal, sys
from pathlib import Path
import numpy, PIL.ImageCms, simplejpeg
from pennyclip.data.images import ImageError, decode, to_srgb

resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[3]),) * 2)
data, chance = Path(sys.argv[1]).read_bytes(), random.Random(0)
seen = {"decoded": 0, "refused": 0}

def mutated():
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at, kind = chance.randrange(len(out) or 1), chance.randrange(6)
        if kind == 0:
            out[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            out[at : at + 4] = chance.choice((b"\\xff" * 4, bytes(4), b"\\x7f\\xff\\xff\\xff"))
        elif kind == 2:
            del out[at : at + chance.randrange(64)]
        elif kind == 3:
            out[at:at] = out[chance.randrange(len(out) or 1) :][:64]
        elif kind == 4:
            out[at : at + 2] = bytes(2)
        else:
            at = chance.randrange(min(len(out), 256) or 1)  # the headers
            out[at : at + 1] = bytes([chance.randrange(256)])
    return bytes(out[: chance.randrange(len(out) + 1)] if chance.random() < 0.1 else out)

for number in range(int(sys.argv[2])):
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[4]))  # its signal ends the process
    try:
        decoded = decode(mutated(), max_pixels=2_000_000)
        pixels = to_srgb(decoded.pixels, decoded.profile)
        assert pixels.dtype == numpy.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
        assert pixels.shape[0] * pixels.shape[1] <= 2_000_000
        seen["decoded"] += 1
    except ImageError:
        seen["refused"] += 1
print(seen["decoded"], seen["refused"])
"""


def photo(mode: str = "RGB") -> Image.Image:
    y, x = np.mgrid[0:48, 0:64]
    waves = [np.sin(x / 9 + p) * 60 + y + 90 for p in (0, 1, 2)]
    return Image.fromarray(np.stack(waves, -1).clip(0, 255).astype(np.uint8)).convert(mode)


def files() -> dict[str, bytes]:
    """20 small pictures, one a format and a way of storing."""
    wide = Image.fromarray((np.mgrid[0:48, 0:64][0] * 1300).astype(np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010F] = "a camera"
    frames = {"save_all": True, "append_images": [photo().rotate(90)]}
    icc = {"icc_profile": (b"\0" * 36 + b"acsp").ljust(300, b"\1")}
    made: dict[str, tuple[Image.Image, str, dict[str, object]]] = {
        "baseline.jpg": (photo(), "JPEG", {}),
        "progressive.jpg": (photo(), "JPEG", {"progressive": True, "exif": exif}),
        "gray.jpg": (photo("L"), "JPEG", icc),
        "cmyk.jpg": (photo("CMYK"), "JPEG", icc),
        "rgb.png": (photo(), "PNG", icc),
        "rgba.png": (photo("RGBA"), "PNG", {"exif": exif}),
        "palette.png": (photo().quantize(16), "PNG", {"transparency": 0}),
        "gray16.png": (wide, "PNG", {}),
        "bilevel.png": (photo("1"), "PNG", {}),
        "still.gif": (photo().quantize(16), "GIF", {}),
        "animated.gif": (photo(), "GIF", frames),
        "plain.bmp": (photo(), "BMP", {}),
        "plain.tif": (photo(), "TIFF", {}),
        "lzw.tif": (photo(), "TIFF", {"compression": "tiff_lzw"}),
        "deflate.tif": (photo("LA").convert("RGBA"), "TIFF", {"compression": "tiff_adobe_deflate"}),
        "fax.tif": (photo("1"), "TIFF", {"compression": "group4"}),
        "lossy.webp": (photo(), "WEBP", {"exif": exif}),
        "animated.webp": (photo("RGBA"), "WEBP", {"lossless": True, **frames}),
        "plain.jp2": (photo(), "JPEG2000", {}),
    }
    last = "avif" if features.check("avif") else "ppm"  # Pillow may be built without it
    made[f"plain.{last}"] = (photo(), last.upper(), {})
    encoded = {}
    for name, (image, kind, options) in made.items():
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        encoded[name] = buffer.getvalue()
    return encoded


FILES = files()


def check(folder: Path, name: str, count: int) -> tuple[int, int]:
    (folder / name).write_bytes(FILES[name])
    arguments = [str(folder / name), str(count), str(MEMORY), str(SECONDS)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{name}: {done.returncode}\n{done.stderr[-2000:]}"
    decoded, refused = map(int, done.stdout.split())
    return decoded, refused


def test_there_are_20_files() -> None:
    assert len(FILES) == 20


@pytest.mark.parametrize("name", ["progressive.jpg", "rgba.png", "lzw.tif", "animated.gif"])
def test_a_few_mutations(tmp_path: Path, name: str) -> None:
    assert sum(check(tmp_path, name, FEW)) == FEW


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(FILES))
def test_many_mutations(tmp_path: Path, name: str) -> None:
    decoded, refused = check(tmp_path, name, MUTATIONS)
    assert decoded + refused == MUTATIONS
    assert refused > 0
