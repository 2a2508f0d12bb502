"""The order in which rows are seen, and every per-sample draw: pure functions of integers.

A sample stands at a global position of an endless stream: epoch = position // rows, and inside
an epoch a keyed permutation says which row. Nothing is stored, so any batch can be had from its
position, whatever the number of ranks, workers and restarts. The functions are ours because
NumPy's random streams may change between versions.
"""

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

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


def permute(positions: I64, epochs: I64, size: int, seed: int) -> I64:
    """Where each position of an epoch leads: a permutation of range(size) for each epoch.

    A Feistel network over the next even number of bits, walked until it falls inside the range
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

    Args:
        positions: [n] positions inside the epoch, 0 <= position < size.
        epochs: [n] epoch of each position.
        size: number of rows, at least 1.
        seed: the run's seed.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = draw(seed, 0, epochs, np.zeros_like(epochs))
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


def stream(start: int, count: int, size: int, seed: int) -> tuple[I64, I64]:
    """Indices and epochs of the samples at global positions start .. start + count - 1.

    Args:
        start: global position of the first sample.
        count: number of samples.
        size: number of rows in an epoch.
        seed: the run's seed.

    Returns:
        [count] indices in range(size) and [count] epochs.
    """
    positions = np.arange(start, start + count, dtype=np.int64)
    epochs = positions // size
    return permute(positions % size, epochs, size, seed), epochs
