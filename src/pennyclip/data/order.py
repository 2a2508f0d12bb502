"""The order in which rows are seen, and every per-sample draw: pure functions of integers.

A sample stands at a global position of an endless stream: epoch = position // rows, and inside
an epoch a keyed permutation says which row. Nothing is stored, so any batch can be had from its
position, whatever the number of ranks, workers and restarts. The functions are ours because
NumPy's random streams may change between versions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

# What a random number is drawn for. Their order is part of every run's result: append only.
ORDER, CAPTION, AREA, ASPECT, LEFT, TOP, STEP = range(7)
FLIP, BRIGHTNESS, CONTRAST, SATURATION, DROPOUT, SYNONYM, WHICH_SYNONYM = range(7, 14)
SHARDS, WINDOW, TURN, SOURCE = range(14, 18)

ROUNDS = 6  # chosen: Luby and Rackoff 1988 show 4 to suffice for an ideal round function


def mix(values: U64) -> U64:
    """SplitMix64's finaliser: a bijection of 64-bit integers that scatters every bit.

    Constants: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(seed: int, purpose: int, epochs: I64, rows: I64) -> U64:
    """[n] random 64-bit integers, one a sample, fixed by (seed, purpose, epoch, row)."""
    key = mix(np.array([seed, purpose], np.int64).astype(np.uint64))
    return mix(mix(mix(epochs.astype(np.uint64) ^ key[0]) ^ rows.astype(np.uint64)) ^ key[1])


def uniform(bits: U64) -> npt.NDArray[np.float64]:
    """[n] numbers in [0, 1) from the upper 53 bits of random integers."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(positions: I64, keys: U64, size: int) -> I64:
    """Where each position leads: a permutation of range(size) for each key.

    A Feistel network over the next even number of bits, walked until it falls inside the range
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

    Args:
        positions: [n] 0 <= position < size.
        keys: [n] random integers.
        size: at least 1.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    out = positions.astype(np.uint64)
    outside = np.ones(len(out), bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        key = keys[outside]
        for r in range(ROUNDS):
            left, right = right, left ^ (mix(right ^ mix(key + np.uint64(r))) & mask)
        out[outside] = (left << half) | right
        outside = out >= np.uint64(size)
    return out.astype(np.int64)


@dataclass(frozen=True)
class Order:
    """The endless stream of samples over the rows of an epoch."""

    seed: int
    shards: I64
    """[S] how many of the rows lie in each shard; they stand shard by shard, each in one run."""
    window: int | None = None
    """Rows are shuffled among so many neighbours, over shuffled shards: for storage that reads
    slowly at random. None: over the whole epoch."""

    @property
    def size(self) -> int:
        """Rows of an epoch."""
        return int(self.shards.sum())

    def at(self, start: int, count: int) -> tuple[I64, I64]:
        """[count] indices in range(size), and epochs, of global positions from `start` on."""
        positions = np.arange(start, start + count, dtype=np.int64)
        epochs, inside = np.divmod(positions, self.size)
        if self.window is None:
            return permute(inside, self._keys(ORDER, epochs), self.size), epochs
        indices = np.empty(count, np.int64)
        windows = inside // self.window
        for epoch, number in {*zip(epochs.tolist(), windows.tolist(), strict=True)}:
            here = (epochs == epoch) & (windows == number)
            first = number * self.window
            length = min(self.window, self.size - first)
            keys = draw(self.seed, WINDOW, epochs[here], windows[here])
            places = first + permute(inside[here] - first, keys, length)
            indices[here] = self._in_shuffled_shards(epoch, places)
        return indices, epochs

    def _in_shuffled_shards(self, epoch: int, places: I64) -> I64:
        """[n] indices of the rows at some places of an epoch whose shards are shuffled whole."""
        numbers = np.arange(len(self.shards))
        shuffled = permute(numbers, self._keys(SHARDS, np.full_like(numbers, epoch)), len(numbers))
        ends = self.shards[shuffled].cumsum()
        at = np.searchsorted(ends, places, side="right")
        return places - ends[at] + self.shards.cumsum()[shuffled[at]]

    def _keys(self, purpose: int, epochs: I64) -> U64:
        return draw(self.seed, purpose, epochs, np.zeros_like(epochs))


@dataclass(frozen=True)
class Mixture:
    """The endless stream of samples over several sources, of which some are seen more often.

    Each source is an endless stream of its own, whose rows come equally often, each time through
    in another order. An epoch takes a fixed number of samples of each.
    """

    seed: int
    rows: I64
    """[S] rows of each source; they stand source by source."""
    takes: I64
    """[S] samples of each source in an epoch."""

    @property
    def size(self) -> int:
        """Samples of an epoch."""
        return int(self.takes.sum())

    def at(self, start: int, count: int) -> tuple[I64, I64]:
        """[count] indices in range(rows.sum()), and how often each one's source had been gone
        through before, of global positions from `start` on."""
        positions = np.arange(start, start + count, dtype=np.int64)
        epochs, inside = np.divmod(positions, self.size)
        turns = permute(inside, draw(self.seed, TURN, epochs, np.zeros_like(epochs)), self.size)
        ends = self.takes.cumsum()
        source = np.searchsorted(ends, turns, side="right")
        own = epochs * self.takes[source] + turns - (ends - self.takes)[source]
        rounds, places = np.divmod(own, self.rows[source])
        indices = (self.rows.cumsum() - self.rows)[source]
        for one in np.unique(source):
            here = source == one
            keys = draw(self.seed, SOURCE, rounds[here], source[here])
            indices[here] += permute(places[here], keys, int(self.rows[one]))
        return indices, rounds


def mixture(seed: int, rows: I64, weights: Sequence[float]) -> Mixture:
    """A weight is how often an epoch shows each row of a source: 2 twice, 0.5 every other row,
    in the next epoch the others. One that is not 0 takes at least one sample."""
    takes = np.rint(rows * np.array(weights)).astype(np.int64)
    least = (rows > 0) & (np.array(weights) > 0)
    return Mixture(seed, rows, np.where(least, np.maximum(takes, 1), 0))
