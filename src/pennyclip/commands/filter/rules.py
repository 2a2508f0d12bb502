"""Rules about a row's own text, size and repetitions: which rows stay."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pennyclip.data.captions import caption_sizes
from pennyclip.data.index import Dataset
from pennyclip.data.order import I64

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rules:
    """What a row must be to stay; None: anything. DataComp's basic filter (Gadre et al. 2023,
    arXiv 2304.14108) has 3 words, 6 characters, 200 pixels and an aspect of 3."""

    min_words: int | None = None
    min_characters: int | None = None
    min_side: int | None = None
    max_aspect: float | None = None

    def masks(self, dataset: Dataset) -> Iterator[tuple[str, Mask]]:
        """Each rule that is set, in words, and [rows] whether a row keeps to it.

        Of a row's captions one is enough. Pictures count as they came, before they were resized.
        """
        if self.min_words is not None or self.min_characters is not None:
            captions = caption_sizes(dataset)
            for least, sizes, what in (
                (self.min_words, captions.words, "words"),
                (self.min_characters, captions.characters, "characters"),
            ):
                if least is not None:
                    longest = np.maximum.reduceat(sizes, dataset.caption_starts[:-1])
                    yield f"a caption of at least {least} {what}", longest >= least
        if self.min_side is not None or self.max_aspect is not None:
            table = dataset.table("width", "height")
            width, height = (table[name].to_numpy() for name in ("width", "height"))
            short, long = np.minimum(width, height), np.maximum(width, height)
            if self.min_side is not None:
                yield f"a shorter side of at least {self.min_side} pixels", short >= self.min_side
            if self.max_aspect is not None:
                what = f"a longer side at most {self.max_aspect:g} times the shorter"
                yield what, long <= self.max_aspect * short


def first_of_each(groups: I64, most: int) -> Mask:
    """[rows] whether fewer than `most` rows before it are of the same group."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(groups[order]) != 0])
    place = np.arange(len(groups)) - np.repeat(starts, np.diff(np.r_[starts, len(groups)]))
    keep = np.empty(len(groups), np.bool_)
    keep[order] = place < most
    return keep
