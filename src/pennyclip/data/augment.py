"""Where a training image is cropped, drawn by (seed, epoch, row)."""

import numpy as np
import numpy.typing as npt

from pennyclip.data.order import I64, draw, uniform

MAX_ASPECT = 4 / 3  # Szegedy et al. 2015, section 6: crops between 3:4 and 4:3

# What a random number is drawn for; order.py uses purpose 0 for the permutation.
CAPTION, AREA, ASPECT, LEFT, TOP, STEP = range(1, 7)

Boxes = npt.NDArray[np.float64]


def choose_captions(seed: int, epochs: I64, rows: I64, counts: I64) -> I64:
    """[n] which of its captions each sample shows: 0 <= choice < counts."""
    return (uniform(draw(seed, CAPTION, epochs, rows)) * counts).astype(np.int64)


def random_crops(seed: int, epochs: I64, rows: I64, area: tuple[float, float]) -> Boxes:
    """Random resized crops, in a unit square that stands for the image.

    Args:
        seed: the run's seed.
        epochs: [n] epoch of each sample.
        rows: [n] row of each sample.
        area: smallest and largest share of the image's area that a crop keeps.

    Returns:
        [n, 4] area share, aspect ratio (width / height), and the position of the left and top
        edge as a share of the room that the crop leaves.
    """
    low, high = area
    numbers = [uniform(draw(seed, purpose, epochs, rows)) for purpose in (AREA, ASPECT, LEFT, TOP)]
    shares = low + (high - low) * numbers[0]
    aspects = np.exp((2 * numbers[1] - 1) * np.log(MAX_ASPECT))
    return np.stack([shares, aspects, numbers[2], numbers[3]], 1)


def crop_pixels(height: int, width: int, crop: npt.NDArray[np.float64]) -> tuple[int, ...]:
    """Top, left, bottom and right edge in pixels of a crop."""
    share, aspect, x, y = crop.tolist()
    wide = min(width, max(1, round((share * height * width * aspect) ** 0.5)))
    high = min(height, max(1, round((share * height * width / aspect) ** 0.5)))
    left, top = round(x * (width - wide)), round(y * (height - high))
    return top, left, top + high, left + wide
