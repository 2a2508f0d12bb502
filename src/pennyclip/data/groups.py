"""Which rows show the same thing, and splits that never part them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from pennyclip.data.order import I64


def normalised(caption: str) -> str:
    """What two captions have in common if they say the same: letters of one case, single spaces."""
    return " ".join(caption.casefold().split())


def group_rows(keys: Iterable[Iterable[bytes]]) -> I64:
    """[rows] the group of each row. Rows that share a key share a group, and so do rows that are
    linked by others; a group is named by its smallest row."""
    parent: list[int] = []
    owner: dict[bytes, int] = {}

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for row, own in enumerate(keys):
        parent.append(row)
        for key in own:
            first, second = sorted((root(owner.setdefault(key, row)), root(row)))
            parent[second] = first
    return np.array([root(row) for row in range(len(parent))], np.int64)


def split_rows(
    groups: I64,
    brought: Sequence[str | None],
    hashes: Sequence[bytes],
    *,
    val_share: float,
    dev_share: float,
    seed: int,
) -> tuple[dict[str, I64], int]:
    """Row ids of train, val, test and dev, and how many train rows had to go.

    A split that the source brings (train, val, test) is kept; what has none is train. A train row
    whose group reaches into val or test is dropped: it would give the answer away. Where no row
    is brought as val, `val_share` of train becomes val; `dev_share` of what is left becomes dev.
    Both take whole groups, in an order fixed by `seed` and the pictures themselves, and stay at
    or below their share; one too small for any group is left out.

    Args:
        groups: [rows] group of each row.
        brought: [rows] the source's split of each row, or None.
        hashes: [rows] pixel hash of each row.
        val_share: of the train rows, 0 <= share < 1.
        dev_share: of the train rows left, 0 <= share < 1.
        seed: of the order in which groups are taken.
    """
    rows = {name: [row for row, split in enumerate(brought) if split == name] for name in HELD}
    held = {int(groups[row]) for taken in rows.values() for row in taken}
    train = [row for row, split in enumerate(brought) if split in (None, "train")]
    clean = [row for row in train if int(groups[row]) not in held]
    crossing = len(train) - len(clean)

    salt = blake2b(str(seed).encode(), digest_size=16).digest()
    smallest: dict[int, bytes] = {}
    for row in clean:
        group = int(groups[row])
        smallest[group] = min(hashes[row], smallest.get(group, hashes[row]))
    order = sorted(smallest, key=lambda g: (blake2b(smallest[g], key=salt).digest(), g))

    if not rows["val"]:
        rows["val"], clean = _carve(clean, groups, order, val_share)
    rows["dev"], rows["train"] = _carve(clean, groups, order, dev_share)
    return {name: np.array(ids, np.int64) for name, ids in rows.items() if ids}, crossing


HELD = ("val", "test")


def _carve(
    rows: list[int], groups: I64, order: list[int], share: float
) -> tuple[list[int], list[int]]:
    """Whole groups, as they come in the order and fit into the share; and the rows left."""
    sizes = Counter(int(groups[row]) for row in rows)
    room = int(share * len(rows))
    taken = set()
    for group in order:
        if 0 < sizes[group] <= room:
            taken.add(group)
            room -= sizes[group]
    inside = [row for row in rows if int(groups[row]) in taken]
    return inside, [row for row in rows if int(groups[row]) not in taken]
