"""Rows that show or say the same: equal pixels, nearly equal pictures, equal captions.

Two pictures are nearly the same where the 64 bits of their perceptual hashes differ in a few
places, and a finer hash of 256 bits agrees. The pairs are found exactly, without comparing all:

    the 64 bits are 4 bands of 16. Hashes at most d bits apart have a band in which they differ in
    at most d // 4 of its bits, so each looks up its own bands, and those with that many bits
    turned round: multi-index hashing (Norouzi, Punjani and Fleet 2012, arXiv 1307.2982).
"""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import combinations

import numpy as np
import pyarrow as pa

from pennyclip.data.groups import group_rows, normalised
from pennyclip.data.order import I64, U64

NEAR_BITS = 6
"""Of 64, in which nearly equal pictures may differ. Measured on 120: 95 % of the copies saved at
half the size and JPEG quality 60 differ in at most 2, those a third brighter in 6 (drawings 10),
those cut by 2 % on all sides in 10, so that about half of these are found."""
FINE_BITS = 64
"""Of 256. Chosen between those cut by 2 % (up to 50) and two road signs in one frame (84)."""
FLAT = 24
"""A hash with fewer bits set is of a picture with few frequencies (blank, a flag of three stripes),
which has many alike that are another picture; most have 31 or 32. Only equal pixels count there.
Chosen: a quarter of the bits are ties."""
BAND, BANDS = 16, 4
CHUNK = 1 << 20  # comparisons at a time. chosen: 40 MB


def row_groups(table: pa.Table, near_bits: int = NEAR_BITS) -> tuple[I64, I64]:
    """The group of each row, and the smallest row that shows nearly the same.

    Rows of one group share pixels, nearly share them, share a caption (but for letters' case and
    spaces), or are of one group of their source; also through others. Captions that are made from
    a class's label don't count.

    Args:
        table: columns of the index, all rows.
        near_bits: up to how many of 64 nearly equal pictures may differ; 0: only equal pixels.

    Returns:
        [rows] groups, named by their smallest rows, and [rows] likewise by pictures alone.
    """
    names = ("pixel_hash", "captions", "source", "group", "label")
    columns = (table[name].to_pylist() for name in names)
    same = near_pictures(table, near_bits)
    groups = group_rows(
        [
            b"pixels" + pixels,
            b"near" + int(near).to_bytes(8, "big"),
            *(_key("caption", normalised(c)) for c in captions if label is None),
            *([_key(f"group {source}", group)] if group is not None else []),
        ]
        for pixels, captions, source, group, label, near in zip(*columns, same, strict=True)
    )
    return groups, same


def _key(kind: str, text: str) -> bytes:
    return blake2b(f"{kind}\0{text}".encode(), digest_size=16).digest()


def near_pictures(table: pa.Table, near_bits: int) -> I64:
    """[rows] the smallest row with equal or nearly equal pixels, also through others."""
    hashes = table["phash"].to_numpy()
    fine = np.frombuffer(b"".join(table["fine_hash"].to_pylist()), np.uint64).reshape(-1, 4)
    links = Links(len(hashes))
    _, first, which = np.unique(
        np.array(table["pixel_hash"].to_pylist(), "S16"), return_index=True, return_inverse=True
    )
    links.join(first[which], np.arange(len(hashes)))
    told = np.flatnonzero(np.bitwise_count(hashes) >= FLAT)
    told = told[links.roots[told] == told]  # of equal pictures one is enough
    if near_bits:
        for a, b in near_pairs(hashes[told], near_bits):
            a, b = told[a], told[b]
            apart = links.roots[a] != links.roots[b]
            a, b = a[apart], b[apart]
            close = np.bitwise_count(fine[a] ^ fine[b]).sum(1) <= FINE_BITS
            links.join(a[close], b[close])
    return links.roots


def near_pairs(hashes: U64, distance: int) -> Iterator[tuple[I64, I64]]:
    """Pairs of positions a < b whose hashes differ in at most `distance` bits.

    Each pair comes at least once, some several times.

    Args:
        hashes: [N] 64 bits each.
        distance: 0 to 64; the work grows with it steeply above 11.

    Yields:
        [P] a and [P] b, a part at a time.
    """
    turned = [
        sum(1 << bit for bit in bits)
        for count in range(distance // BANDS + 1)
        for bits in combinations(range(BAND), count)
    ]
    for band in range(BANDS):
        values = ((hashes >> np.uint64(band * BAND)) & np.uint64(0xFFFF)).astype(np.int64)
        order = np.argsort(values, kind="stable")  # neighbours look up the same places
        starts = np.searchsorted(values[order], np.arange((1 << BAND) + 1))
        for mask in turned:
            probe = values[order] ^ mask
            begin, counts = starts[probe], starts[probe + 1] - starts[probe]
            done = np.concatenate([[0], np.cumsum(counts)])
            for low in range(0, int(done[-1]), CHUNK):
                flat = np.arange(low, min(low + CHUNK, int(done[-1])))
                place = np.searchsorted(done, flat, side="right") - 1
                a, b = order[place], order[begin[place] + flat - done[place]]
                a, b = a[a < b], b[a < b]
                near = np.bitwise_count(hashes[a] ^ hashes[b]) <= distance
                if near.any():
                    yield a[near], b[near]


class Links:
    """Components of a graph that grows by many edges at a time."""

    def __init__(self, count: int) -> None:
        self.roots: I64 = np.arange(count)
        """[N] the smallest node that each is linked to."""

    def join(self, a: I64, b: I64) -> None:
        """Link a[i] with b[i], all at once."""
        roots = self.roots
        while len(a):
            low, high = np.minimum(roots[a], roots[b]), np.maximum(roots[a], roots[b])
            apart = low < high
            if not apart.any():
                break
            a, b = a[apart], b[apart]
            np.minimum.at(roots, high[apart], low[apart])
            while not np.array_equal(shorter := roots[roots], roots):
                roots[:] = shorter
