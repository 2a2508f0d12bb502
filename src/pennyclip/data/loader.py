"""Training batches, each a pure function of its global position."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from pennyclip.base.errors import RunError
from pennyclip.config.keys import Augment
from pennyclip.data import augment
from pennyclip.data.index import Dataset
from pennyclip.data.order import I64, Mixture, Order
from pennyclip.data.resize import centre_square, resize
from pennyclip.data.stored import States, Stored
from pennyclip.data.synonyms import Synonyms
from pennyclip.data.text import Tokenizer, pad, truncate
from pennyclip.data.tokens import TokenStore

PREPROCESSING = "shorter side, bicubic, centre 1"
"""Names what `fit_square` does without a crop: stored features belong to one of these."""

PREFETCH = 2  # batches ready ahead of the one in use, a worker. chosen: one being made, one done


@dataclass(frozen=True)
class Batch:
    """B pairs. A frozen trunk's stored features, or the states behind its frozen first layers,
    stand in place of its input."""

    rows: Int64[Tensor, " B"]
    groups: Int64[Tensor, " B"]
    images: UInt8[Tensor, "B 3 H W"] | None
    tokens: Int64[Tensor, "B L"] | None
    lengths: Int64[Tensor, " B"] | None
    image_features: Float[Tensor, "B V"] | None
    text_features: Float[Tensor, "B W"] | None
    image_states: States | None = None
    text_states: States | None = None
    changes: augment.PixelChanges | None = None
    """What is still to be done to the images, on the device."""
    unreadable: tuple[tuple[int, str], ...] = ()
    """Rows that belong here and could not be read, and why; the row before each stands in."""

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device, its images changed there. Out of pinned memory the copies run by
        themselves: what is computed next waits for them, and the caller does not."""
        moved = self._each(lambda value: value.to(device, non_blocking=True))
        if moved.images is None:
            return moved
        images = moved.images.contiguous()
        if self.changes is not None:
            images = augment.change_pixels(images, self.changes.to(device))
        return replace(moved, images=images, changes=None)

    def pin_memory(self) -> "Batch":
        """The batch in memory from which a GPU copies by itself."""
        return self._each(lambda value: value.pin_memory())

    def _each(self, change: Callable[[Any], Any]) -> "Batch":
        # Lengths stay on the host, where packing needs them: no wait for the device.
        data = {
            name: change(value)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | States) and name != "lengths"
        }
        return replace(self, **data)


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The training rows of a dataset as an endless stream of batches.

    Epochs follow each other without a seam: a batch may hold the end of one and the start of the
    next, and nothing is dropped.
    """

    dataset: Dataset
    rows: I64
    """[n] the dataset's rows that take part, ascending."""
    tokens: TokenStore
    tokenizer: Tokenizer
    """The one that made them: it reads the captions that are changed."""
    batch_size: int
    """Pairs in a batch of all ranks together."""
    seed: int
    image_size: int
    text_length: int
    augment: Augment
    workers: int
    synonyms: Synonyms | None = None
    """What `augment.synonyms` takes words from."""
    shuffle_window: int | None = None
    """See `Order.window`."""
    mixture: Mixture | None = None
    """The order, where some sources are seen more often than others."""
    rank: int = 0
    """Each of `world` ranks loads an equal part of every batch, one behind the other."""
    world: int = 1
    pin_memory: bool = False
    """For a GPU."""
    image_store: Stored | None = None
    """What frozen layers have made of the dataset's images, uncropped."""
    text_store: Stored | None = None
    """What frozen layers have made of the dataset's captions, cut to the same length."""

    @cached_property
    def order(self) -> Order | Mixture:
        if self.mixture is not None:
            return self.mixture
        shards = np.array([len(self.rows)])
        if self.shuffle_window is not None:
            shards = np.bincount(self.dataset.rows["shard"][self.rows])
        return Order(self.seed, shards, self.shuffle_window)

    def batch(self, number: int) -> Batch:
        """This rank's part of batch `number` of the run, counted from 0 over all its epochs.

        A row that cannot be read costs that row: the one before it in the part stands in. Being of
        the same group as itself, it is no negative of itself.

        Raises:
            UnreadableRow: none of its rows can be read.
        """
        part = self.batch_size // self.world
        assert part * self.world == self.batch_size, "every rank has an equal part of a batch"
        indices, epochs = self.order.at(number * self.batch_size + self.rank * part, part)
        made = self.samples(self.rows[indices], epochs)
        return made.pin_memory() if self.pin_memory else made

    def samples(self, rows: I64, epochs: I64) -> Batch:
        """[B] rows of the dataset as they are seen in some epochs. Raises as `batch` does."""
        counts = self.dataset.rows["captions"][rows].astype(np.int64)
        choices = augment.choose_captions(self.seed, epochs, rows, counts)
        images, texts, failed = self._read(rows, epochs, choices)
        unreadable = tuple((int(rows[place]), str(why)) for place, why in failed.items())
        if failed:
            at = _before(len(rows), failed)
            rows, epochs, choices = rows[at], epochs[at], choices[at]
            images = None if images is None else images[at]
            texts = None if texts is None else [texts[place] for place in at]

        image_features = image_states = text_features = text_states = changes = None
        tokens = lengths = None
        if self.image_store is not None:
            image_features, image_states, _ = _stored(self.image_store, rows)
        elif self.augment.flip or self.augment.color_jitter:
            changes = augment.draw_pixel_changes(
                self.seed, epochs, rows, self.augment.flip, self.augment.color_jitter
            )
        captions = self.dataset.caption_starts[rows] + choices
        if self.text_store is not None:
            text_features, text_states, lengths = _stored(self.text_store, captions)
        elif texts is None:
            tokens, lengths = map(torch.from_numpy, self.tokens.batch(captions, self.text_length))
        else:
            tokens, lengths = self._tokens(self.changed_words(texts, rows, epochs))
        return Batch(
            rows=torch.from_numpy(rows),
            groups=torch.from_numpy(self.dataset.rows["group"][rows].astype(np.int64)),
            images=images,
            tokens=tokens,
            lengths=lengths,
            image_features=image_features,
            text_features=text_features,
            image_states=image_states,
            text_states=text_states,
            changes=changes,
            unreadable=unreadable,
        )

    def _read(
        self, rows: I64, epochs: I64, choices: I64
    ) -> tuple[UInt8[Tensor, "B 3 H W"] | None, list[str] | None, dict[int, "UnreadableRow"]]:
        """Images, where they are needed; captions, where they are changed; and what failed."""
        size, (low, high) = self.image_size, self.augment.crop_scale
        images = texts = crops = None
        if self.image_store is None:
            # Channels last, as pictures are decoded: they are copied three times as fast.
            shape, order = (len(rows), 3, size, size), torch.channels_last
            images = torch.empty(shape, dtype=torch.uint8, memory_format=order)
            if (low, high) != (1.0, 1.0):
                crops = augment.random_crops(self.seed, epochs, rows, (low, high))
        if self.text_store is None and (self.augment.word_dropout or self.augment.synonyms):
            texts = [""] * len(rows)

        def read(place: int, row: int) -> None:
            if images is not None:
                crop = None if crops is None else crops[place]
                images[place] = load_image(self.dataset, row, size, crop)
            if texts is not None:
                texts[place] = self.dataset.captions(row)[choices[place]]

        return images, texts, _try_rows(self.dataset, rows, read)

    def changed_words(self, captions: list[str], rows: I64, epochs: I64) -> list[str]:
        """Captions of some rows as they are seen in some epochs."""
        dropout, replaced = self.augment.word_dropout, self.augment.synonyms
        return augment.change_words(
            captions, self.seed, epochs, rows, dropout, replaced, self.synonyms
        )

    def _tokens(self, captions: list[str]) -> tuple[Int64[Tensor, "B L"], Int64[Tensor, " B"]]:
        """What the token store would give, had it these captions."""
        ids = [truncate(self.tokenizer.encode(caption), self.text_length) for caption in captions]
        tokens, lengths = pad(ids, limit=self.text_length)
        return torch.from_numpy(tokens), torch.from_numpy(lengths)

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


def _stored(
    store: Stored, numbers: I64
) -> tuple[Float[Tensor, "B W"] | None, States | None, Int64[Tensor, " B"] | None]:
    """Features or states from a store, and the lengths of captions."""
    values, lengths = store.take(numbers)
    if store.layers is None:
        return values.float(), None, lengths
    return None, States(values, store.layers), lengths


class UnreadableRow(RunError):
    """A row of a prepared dataset that cannot be read, although `prepare` could."""


def load_images(dataset: Dataset, rows: I64, size: int) -> UInt8[Tensor, "B 3 size size"]:
    """The centred squares of some rows' images.

    Raises:
        UnreadableRow: one of them cannot be read.
    """
    images = torch.empty(len(rows), 3, size, size, dtype=torch.uint8)

    def read(place: int, row: int) -> None:
        images[place] = load_image(dataset, row, size)

    for failure in _try_rows(dataset, rows, read).values():
        raise failure
    return images


def load_image(
    dataset: Dataset, row: int, size: int, crop: npt.NDArray[np.float64] | None = None
) -> UInt8[Tensor, "3 size size"]:
    """Read, crop and resize one row's image; without a crop, the centred square."""
    return fit_square(dataset.pixels(row, size), size, crop)


def _try_rows(
    dataset: Dataset, rows: I64, read: Callable[[int, int], None]
) -> dict[int, UnreadableRow]:
    """Call `read(place, row)` for each row; by its place, what could not be read, and why."""
    failed: dict[int, UnreadableRow] = {}
    for place, row in enumerate(rows.tolist()):
        try:
            read(place, row)
        except (OSError, ValueError) as error:
            at = dataset.rows[row]
            shard = dataset.shard_path(int(at["shard"]))
            failed[place] = UnreadableRow(
                f"row {row}, {at['image_length']:,} bytes from {at['image_offset']:,} on in "
                f"{shard}: {error}. It was whole when the dataset was prepared: "
                "bring the file back from a copy, or prepare the dataset again."
            )
    return failed


def _before(count: int, failed: dict[int, UnreadableRow]) -> I64:
    """[count] the last place up to each, around the batch's end, that has not failed."""
    if len(failed) == count:
        raise failed[0]
    good = [place for place in range(count) if place not in failed]
    return np.array(good)[np.searchsorted(good, np.arange(count), side="right") - 1]


def fit_square(
    pixels: UInt8[np.ndarray, "H W 3"], size: int, crop: npt.NDArray[np.float64] | None = None
) -> UInt8[Tensor, "3 size size"]:
    """A crop of an image at `size` pixels a side; without one, its `centre_square`."""
    if crop is None:
        square = centre_square(pixels, size)
    else:
        height, width = pixels.shape[:2]
        top, left, bottom, right = augment.crop_pixels(height, width, crop)
        square = resize(pixels[top:bottom, left:right], size, size)
    return torch.from_numpy(square).permute(2, 0, 1)
