"""What is done to training samples before they are seen, drawn by (seed, epoch, row).

Pictures are cropped where they are resized; flips and colours are changed in the batch, on its
device. Captions lose and change words before they become tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from pennyclip.data.order import (
    AREA,
    ASPECT,
    BRIGHTNESS,
    CAPTION,
    CONTRAST,
    DROPOUT,
    FLIP,
    I64,
    LEFT,
    SATURATION,
    SYNONYM,
    TOP,
    WHICH_SYNONYM,
    draw,
    mix,
    uniform,
)
from pennyclip.data.synonyms import Synonyms

MAX_ASPECT = 4 / 3  # Szegedy et al. 2015, section 6: crops between 3:4 and 4:3

CHUNK = 32  # images changed at a time. chosen: 19 MB of float32 at 224 pixels

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


@dataclass(frozen=True)
class PixelChanges:
    """What happens to B pictures beside the crop."""

    flip: Bool[Tensor, " B"]
    jitter: Float[Tensor, "B 3"] | None
    """Factors of brightness, contrast and saturation; None: colours stay."""

    def to(self, device: torch.device) -> "PixelChanges":
        jitter = None if self.jitter is None else self.jitter.to(device, non_blocking=True)
        return PixelChanges(self.flip.to(device, non_blocking=True), jitter)


def draw_pixel_changes(
    seed: int, epochs: I64, rows: I64, flip: float, jitter: float
) -> PixelChanges:
    """The changes of some samples.

    Args:
        seed: the run's seed.
        epochs: [n] epoch of each sample.
        rows: [n] row of each sample.
        flip: share of the pictures that is mirrored.
        jitter: factors lie between 1 - jitter and 1 + jitter.
    """
    flips = torch.from_numpy(uniform(draw(seed, FLIP, epochs, rows)) < flip)
    if jitter == 0:
        return PixelChanges(flips, None)
    purposes = (BRIGHTNESS, CONTRAST, SATURATION)
    numbers = np.stack([uniform(draw(seed, p, epochs, rows)) for p in purposes], 1)
    return PixelChanges(flips, torch.from_numpy(1 + jitter * (2 * numbers - 1)).float())


def change_pixels(
    images: UInt8[Tensor, "B 3 H W"], changes: PixelChanges
) -> UInt8[Tensor, "B 3 H W"]:
    """Mirror some pictures; then brightness, contrast and saturation as torchvision defines them.

    Always in this order (torchvision's ColorJitter draws one): among factors near 1 it hardly
    shows. Rounded once, at the end.
    """
    changed = torch.where(changes.flip[:, None, None, None], images.flip(-1), images)
    if changes.jitter is not None:
        for first in range(0, len(changed), CHUNK):
            at = slice(first, first + CHUNK)
            changed[at] = _jittered(changed[at], changes.jitter[at])
    return changed


def _jittered(
    images: UInt8[Tensor, "B 3 H W"], factors: Float[Tensor, "B 3"]
) -> Float[Tensor, "B 3 H W"]:
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind(1)
    pixels = images.float().mul_(brightness).clamp_(0, 255)
    mean = _gray(pixels).mean((1, 2, 3), keepdim=True)
    pixels = pixels.sub_(mean).mul_(contrast).add_(mean).clamp_(0, 255)
    gray = _gray(pixels)
    return pixels.sub_(gray).mul_(saturation).add_(gray).clamp_(0, 255).round_()


def _gray(pixels: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B 1 H W"]:
    """Luma by the weights that torchvision uses (ITU-R BT.601, to four digits)."""
    return 0.2989 * pixels[:, :1] + 0.587 * pixels[:, 1:2] + 0.114 * pixels[:, 2:]


def change_words(
    captions: list[str],
    seed: int,
    epochs: I64,
    rows: I64,
    dropout: float,
    replaced: float = 0.0,
    synonyms: Synonyms | None = None,
) -> list[str]:
    """Captions with some words dropped and some replaced; those without a change stay as they are.

    Args:
        captions: n captions.
        seed: the run's seed.
        epochs: [n] epoch of each sample.
        rows: [n] row of each sample.
        dropout: share of the words that is dropped; a caption keeps at least one.
        replaced: share of the words that is replaced, if they have a synonym.
        synonyms: of English words.
    """
    words = [caption.split() for caption in captions]
    counts = np.array([len(one) for one in words], np.int64)
    ends = counts.cumsum()
    owner = np.repeat(np.arange(len(words)), counts)
    place = (np.arange(len(owner)) - (ends - counts)[owner]).astype(np.uint64)

    def numbers(purpose: int) -> npt.NDArray[np.float64]:
        return uniform(mix(draw(seed, purpose, epochs, rows)[owner] + place))

    drawn, swap, which = numbers(DROPOUT), numbers(SYNONYM) < replaced, numbers(WHICH_SYNONYM)
    out = []
    for caption, mine, end in zip(captions, words, ends.tolist(), strict=True):
        at = slice(end - len(mine), end)
        if not mine or not ((drawn[at] < dropout).any() or swap[at].any()):
            out.append(caption)
            continue
        limit = min(dropout, drawn[at].max())  # the largest stays in any case
        changed = [
            synonyms.replace(word, choice) if swapped and synonyms is not None else word
            for word, number, swapped, choice in zip(
                mine, drawn[at], swap[at], which[at], strict=True
            )
            if number >= limit
        ]
        out.append(" ".join(changed))
    return out
