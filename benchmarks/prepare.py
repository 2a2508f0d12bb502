"""How many photographs a second does one core decode and resize, beside Pillow?

    python benchmarks/prepare.py [--photographs FOLDER] [--count 48] [--rounds 9] [--out FILE]

1024 x 768 JPEGs, brought to a shorter side of 256 and to the 224-px square that evaluation sees.
Pillow decodes in full and resizes as CLIP's preprocessing does (bicubic, antialiased); ours is what
`pennyclip prepare` does. Sides take turns in one thread; ratios are taken within a round, by CPU
seconds. The error is the mean absolute difference from Pillow's pixels, of 255.

Below it the whole of `prepare`: decoding, resizing, hashes, encoding, writing, groups and splits,
by the clock, for as many processes as there are cores.

Marks: decode and resize at least 2.5 times Pillow's images a second, error below 0.01.
"""

import argparse
import datetime
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from machine import processor, publish
from pennyclip.data import images
from pennyclip.data.prepare import prepare
from pennyclip.data.resize import centre_square, fit_to
from photographs import HINT, find_photographs, photographs

SIDE, SQUARE = 256, 224
MARK, ERROR = 2.5, 0.01

Pixels = np.ndarray


def pillow(jpeg: bytes) -> Image.Image:
    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def shorter(image: Image.Image, side: int) -> Image.Image:
    short = min(image.size)
    width, height = (int(side * edge / short) for edge in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def pillow_shortest(jpeg: bytes) -> Pixels:
    return np.asarray(shorter(pillow(jpeg), SIDE))


def our_shortest(jpeg: bytes) -> Pixels:
    return fit_to(images.decode(jpeg).pixels, SIDE, "shortest")


def pillow_square(jpeg: bytes) -> Pixels:
    image = shorter(pillow(jpeg), SQUARE)
    left, top = (round((edge - SQUARE) / 2) for edge in image.size)
    return np.asarray(image.crop((left, top, left + SQUARE, top + SQUARE)))


def our_square(jpeg: bytes) -> Pixels:
    return centre_square(images.decode(jpeg).pixels, SQUARE)


KINDS: dict[str, tuple[Callable[[bytes], Pixels], Callable[[bytes], Pixels]]] = {
    f"shorter side {SIDE}": (our_shortest, pillow_shortest),
    f"square {SQUARE}": (our_square, pillow_square),
}


def seconds(make: Callable[[bytes], Pixels], jpegs: list[bytes]) -> float:
    start = time.process_time()
    for jpeg in jpegs:
        make(jpeg)
    return time.process_time() - start


def decode_and_resize(jpegs: list[bytes], rounds: int) -> list[str]:
    lines = [f"{'':20}{'ours/s':>8}{'Pillow/s':>10}{'ratio':>7}{'quartiles':>11}{'error':>9}"]
    for name, (ours, theirs) in KINDS.items():
        error = statistics.mean(
            float(np.abs(ours(jpeg).astype(float) - theirs(jpeg)).mean()) for jpeg in jpegs
        )
        times = []
        for number in range(rounds):
            turn = (seconds(ours, jpegs), seconds(theirs, jpegs))
            if number % 2:
                turn = (seconds(theirs, jpegs), seconds(ours, jpegs))[::-1]
            times.append(turn)
        low, mid, high = statistics.quantiles(b / a for a, b in times)
        mine, other = (len(jpegs) / statistics.median(side) for side in zip(*times, strict=True))
        verdict = "met" if mid >= MARK and error < ERROR else "MISSED"
        lines.append(
            f"{name:20}{mine:8.0f}{other:10.0f}{mid:7.2f}{f'{low:.2f}-{high:.2f}':>11}"
            f"{error:9.4f}  {verdict}"
        )
    return lines


def whole(jpegs: list[bytes]) -> list[str]:
    """`prepare` of all photographs: one long run, so that starting its processes counts little."""
    lines = [f"{'prepare':20}{'images/s':>8}{'seconds':>10}"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "photographs"
        source.mkdir()
        for number, jpeg in enumerate(jpegs):
            (source / f"{number}.jpg").write_bytes(jpeg)
            (source / f"{number}.txt").write_text(f"photograph number {number}")
        for name, raw in (("jpeg", None), (f"jpeg and raw {SQUARE}", SQUARE)):
            size = max(1, len(jpegs) // 4)
            out = Path(folder) / name
            found = prepare([str(source)], out, raw=raw, shard_size=size, quiet=True)
            lines.append(f"{name:20}{found.inputs / found.seconds:8.0f}{found.seconds:10.1f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    jpegs = photographs(find_photographs(args.photographs), 1024, 768, args.count)
    if not jpegs:
        parser.error(f"no photographs of at least 1024 x 768; {HINT}")
    head = [
        f"{datetime.date.today()}  {processor()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; torch {torch.__version__}, Pillow {version('pillow')}, "
        f"simplejpeg {version('simplejpeg')}; {args.count} photographs of 1024 x 768, "
        f"{args.rounds} rounds",
        "",
    ]
    publish([*head, *decode_and_resize(jpegs, args.rounds), "", *whole(jpegs * 32)], args.out)


if __name__ == "__main__":
    main()
