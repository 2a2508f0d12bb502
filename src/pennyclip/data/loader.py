"""Training batches, each a pure function of its global position."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from pennyclip.data import augment
from pennyclip.data.images import decode_jpeg
from pennyclip.data.index import Dataset
from pennyclip.data.order import I64, stream
from pennyclip.data.tokens import TokenStore

PREPROCESSING = "shorter side, bicubic, centre 1"
"""Names what `fit_square` does without a crop: stored features belong to one of these."""

PREFETCH = 2  # batches ready ahead of the one in use, a worker. chosen: one being made, one done


@dataclass(frozen=True)
class Batch:
    """B pairs. A tower whose trunk is frozen gets stored features instead of its input."""

    rows: Int64[Tensor, " B"]
    groups: Int64[Tensor, " B"]
    images: UInt8[Tensor, "B 3 H W"] | None
    tokens: Int64[Tensor, "B L"] | None
    lengths: Int64[Tensor, " B"] | None
    image_features: Float[Tensor, "B V"] | None
    text_features: Float[Tensor, "B W"] | None

    def to(self, device: torch.device) -> "Batch":
        moved: dict[str, Any] = {
            # Lengths stay on the host, where packing needs them: no wait for the device.
            name: value if value is None or name == "lengths" else value.to(device)
            for name, value in vars(self).items()
        }
        return Batch(**moved)


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The training rows of a dataset as an endless stream of batches.

    Epochs follow each other without a seam: a batch may hold the end of one and the start of the
    next, and nothing is dropped.
    """

    dataset: Dataset
    rows: I64
    """[n] the dataset's rows that take part."""
    tokens: TokenStore
    batch_size: int
    seed: int
    image_size: int
    text_length: int
    crop_scale: tuple[float, float]
    workers: int
    image_features: npt.NDArray[np.float16] | None = None
    """[rows of the dataset, V] stored features of a frozen image trunk."""
    text_features: npt.NDArray[np.float16] | None = None
    """[captions of the dataset, W] stored features of a frozen text trunk."""

    def batch(self, number: int) -> Batch:
        """Batch `number` of the run, counted from 0 over all its epochs."""
        indices, epochs = stream(
            number * self.batch_size, self.batch_size, len(self.rows), self.seed
        )
        rows = self.rows[indices]
        counts = self.dataset.rows["captions"][rows].astype(np.int64)
        captions = self.dataset.caption_starts[rows] + augment.choose_captions(
            self.seed, epochs, rows, counts
        )
        images = tokens = lengths = image_features = text_features = None
        if self.image_features is not None:
            image_features = torch.from_numpy(self.image_features[rows].astype(np.float32))
        else:
            crops = None
            if self.crop_scale != (1.0, 1.0):
                crops = augment.random_crops(self.seed, epochs, rows, self.crop_scale)
            images = load_images(self.dataset, rows, self.image_size, crops)
        if self.text_features is not None:
            text_features = torch.from_numpy(self.text_features[captions].astype(np.float32))
        else:
            ids, sizes = self.tokens.batch(captions, self.text_length)
            tokens, lengths = torch.from_numpy(ids), torch.from_numpy(sizes)
        return Batch(
            rows=torch.from_numpy(rows),
            groups=torch.from_numpy(self.dataset.rows["group"][rows].astype(np.int64)),
            images=images,
            tokens=tokens,
            lengths=lengths,
            image_features=image_features,
            text_features=text_features,
        )

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches start .. stop - 1 in order, made ahead by `workers` threads.

        Threads, because decoding, resizing and reading release Python's lock: they cost 4 % where
        processes cost 43 % (measured at batch 250).
        """
        if self.workers == 0:
            yield from map(self.batch, range(start, stop))
            return
        with ThreadPoolExecutor(self.workers, "loader") as pool:
            ahead: deque[Future[Batch]] = deque()
            try:
                for number in range(start, stop):
                    ahead.append(pool.submit(self.batch, number))
                    if len(ahead) > self.workers * PREFETCH:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()


def load_images(
    dataset: Dataset, rows: I64, size: int, crops: augment.Boxes | None = None
) -> UInt8[Tensor, "B 3 size size"]:
    """Decode, crop and resize the images of some rows; without crops, the centred square."""
    images = torch.empty(len(rows), 3, size, size, dtype=torch.uint8)
    for i, row in enumerate(rows.tolist()):
        pixels = decode_jpeg(dataset.image_bytes(row))
        images[i] = fit_square(pixels, size, None if crops is None else crops[i])
    return images


def fit_square(
    pixels: UInt8[np.ndarray, "H W 3"], size: int, crop: npt.NDArray[np.float64] | None = None
) -> UInt8[Tensor, "3 size size"]:
    """A crop of an image at `size` pixels a side.

    Without a crop, CLIP's own preprocessing: the shorter side brought to `size`, then the centre
    cut out, rounded as torchvision does. Bicubic with antialiasing on uint8, which equals Pillow's
    up to 0.002 of 255.
    """
    height, width = pixels.shape[:2]
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    if crop is not None:
        top, left, bottom, right = augment.crop_pixels(height, width, crop)
        return _resize(image[..., top:bottom, left:right], size, size)[0]
    short = min(height, width)
    image = _resize(image, int(size * height / short), int(size * width / short))
    top, left = (round((edge - size) / 2) for edge in image.shape[-2:])
    return image[0, :, top : top + size, left : left + size]


def _resize(image: UInt8[Tensor, "1 3 H W"], height: int, width: int) -> Tensor:
    if image.shape[-2:] == (height, width):
        return image
    return F.interpolate(image, (height, width), mode="bicubic", antialias=True)
