"""Hashes by which equal and nearly equal pictures are found: see `duplicates`."""

from functools import cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from pennyclip.data.images import U8
from pennyclip.data.resize import resize

NOISE = 2.0
"""Grey levels (standard deviation) that are no picture: chosen, what JPEG at quality 75 leaves on
flat ground. A frequency no stronger says nothing."""


def pixel_hash(pixels: U8) -> bytes:
    """16 bytes that identify a picture by its size and pixels: blake2b."""
    digest = blake2b(np.array(pixels.shape, "<u4").tobytes(), digest_size=16)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()


def phash(pixels: U8) -> int:
    """64-bit perceptual hash: which low frequencies of the 32 x 32 gray picture exceed their
    median (Zauner 2010, section 3.2.1). Resaved copies differ in at most 6 to 8 bits."""
    return int.from_bytes(_frequency_bits(pixels, 8), "big")


def fine_hash(pixels: U8) -> bytes:
    """The same with twice the frequencies each way, of the 64 x 64 picture: 256 bits, which tell
    apart pictures that differ inside a common frame."""
    return _frequency_bits(pixels, 16)


@cache
def _dct(count: int) -> npt.NDArray[np.float64]:
    """[count, 4 count] the lowest rows of the DCT-II; scaling doesn't matter to a comparison."""
    return np.cos(np.arange(count)[:, None] * (2 * np.arange(4 * count) + 1) * np.pi / 8 / count)


def _frequency_bits(pixels: U8, count: int) -> bytes:
    dct = _dct(count)
    gray = resize(pixels, 4 * count, 4 * count) @ np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
    low = (dct @ gray @ dct.T).ravel()
    low[np.abs(low) < NOISE * 2 * count] = 0  # sqrt(2 count) is the length of each row of the DCT
    return np.packbits(low > np.median(low[1:])).tobytes()  # without the mean brightness
