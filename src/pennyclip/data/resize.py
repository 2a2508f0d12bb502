"""Pictures brought to size: whole, as a square, or as CLIP's own preprocessing has them.

Torch is imported where it is needed: a process that only hands out work should not spend seconds.
"""

from typing import Literal, get_args

import numpy as np

from pennyclip.data.images import U8

Fit = Literal["shortest", "crop", "pad"]
"""How a picture is brought to size: its shorter side; the square in its middle; or all of it, in
the middle of a white square."""
FITS = get_args(Fit)

LONGEST = 16
"""Times its shorter side that a picture's longer one counts, around the centre. Chosen: of a line
1 pixel high and 65,000 wide, CLIP's preprocessing would make 10 GB, to cut a square out of it."""


def fit_to(pixels: U8, side: int, how: Fit) -> U8:
    """[H, W, 3] with the shorter side (or the square's) at most `side` pixels; never enlarged."""
    if how == "pad":
        return _pad(pixels, side)
    pixels = resize_short_side(pixels, side)
    short = min(pixels.shape[:2])
    if how == "crop" and pixels.shape[0] != pixels.shape[1]:
        return _centre(pixels, short)
    return pixels


def _pad(pixels: U8, side: int) -> U8:
    height, width = pixels.shape[:2]
    long = max(height, width)
    if long > side:
        height, width = (max(1, (edge * side + long // 2) // long) for edge in (height, width))
        pixels, long = resize(pixels, height, width), side
    if height == width:
        return pixels
    square = np.full((long, long, 3), 255, np.uint8)
    top, left = (long - height) // 2, (long - width) // 2
    square[top : top + height, left : left + width] = pixels
    return square


def resize_short_side(pixels: U8, side: int) -> U8:
    """[H, W, 3] with its shorter side brought down to `side` pixels; never enlarged."""
    height, width = pixels.shape[:2]
    short = min(height, width)
    if short <= side:
        return pixels
    size = [(edge * side + short // 2) // short for edge in (height, width)]
    return resize(pixels, size[0], size[1])


def centre_square(pixels: U8, side: int) -> U8:
    """[side, side, 3] as CLIP's own preprocessing has it: the shorter side brought to `side`, up or
    down, then the centre cut out, rounded as torchvision does."""
    height, width = pixels.shape[:2]
    short = min(height, width)
    top, left = (max(0, edge - LONGEST * short) // 2 for edge in (height, width))
    pixels = pixels[top : height - top, left : width - left]
    height, width = (int(side * edge / short) for edge in pixels.shape[:2])
    return _centre(resize(pixels, height, width), side)


def _centre(pixels: U8, side: int) -> U8:
    top, left = (round((edge - side) / 2) for edge in pixels.shape[:2])
    return pixels[top : top + side, left : left + side]


def resize(pixels: U8, height: int, width: int) -> U8:
    """[height, width, 3] by torch's antialiased bicubic on uint8: CLIP's own (Pillow's) within
    0.01 of 255 in the mean, and 2 at most, at a third of the time."""
    import torch

    if pixels.shape[:2] == (height, width):
        return pixels
    # Of a crop, a copy: torch is fast where the colours of a pixel, and the pixels, are neighbours;
    # and it sees that they are only if the batch's axis is there before the axes are turned.
    planes = torch.from_numpy(np.ascontiguousarray(pixels))[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        planes, (height, width), mode="bicubic", antialias=True, align_corners=False
    )
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())
