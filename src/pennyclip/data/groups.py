"""Which rows show the same thing, and splits that never part them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import numpy as np

from pennyclip.data.order import I64

HELD = ("val", "test")
"""What a source may hold out, and no training row may repeat."""


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


def with_labels(groups: I64, labels: Sequence[str | None], captions: Sequence[list[str]]) -> I64:
    """[rows] groups in which pictures of one class are one group too.

    A class may stand on both sides of a split, so this is not for splitting: captions made from a
    class's name are no captions of a picture. A picture that two classes share doesn't make them
    one: they would no longer be told apart.

    Args:
        groups: [rows] of what must not be parted; captions of rows with a label don't count there.
        labels: [rows] the class, or None.
        captions: [rows] the captions.
    """
    if not any(labels):
        return groups
    classes: dict[int, set[str]] = {}
    for group, label in zip(groups.tolist(), labels, strict=True):
        if label is not None:
            classes.setdefault(group, set()).add(normalised(label))
    return group_rows(
        [
            *([f"row {group}".encode()] if label is None or len(classes[group]) == 1 else []),
            *([f"label {normalised(label)}".encode()] if label is not None else []),
            *(f"caption {normalised(caption)}".encode() for caption in own),
        ]
        for group, label, own in zip(groups.tolist(), labels, captions, strict=True)
    )


def split_rows(
    groups: I64,
    brought: Sequence[str | None],
    hashes: Sequence[bytes],
    *,
    val_share: float,
    dev_share: float,
    seed: int,
    settled: Mapping[str, I64] | None = None,
    first: int = 0,
) -> tuple[dict[str, I64], I64]:
    """Row ids of train, val, test and dev, and of the rows that are in none.

    A split that the source brings (train, val, test) is kept; what has none is train. A train row
    whose group reaches into val or test is dropped: it would give the answer away. Where no row
    is brought as val, `val_share` of train becomes val; `dev_share` of what is left becomes dev.
    Both take whole groups, in an order fixed by `seed` and the pictures themselves, and stay at
    or below their share; one too small for any group is left out.

    Rows that were appended leave the others where they are. One whose group reaches into a split
    of theirs belongs there: to train, or where its own source says the same; else it is dropped.

    Args:
        groups: [rows] group of each row.
        brought: [rows] the source's split of each row, or None.
        hashes: [rows] pixel hash of each row.
        val_share: of the train rows, 0 <= share < 1.
        dev_share: of the train rows left, 0 <= share < 1.
        seed: of the order in which groups are taken.
        settled: the splits of the rows before `first`.
        first: rows from here on are to be split.
    """
    settled = settled or {}
    sides: dict[int, set[str]] = {}
    for name, ids in settled.items():
        for group in groups[ids].tolist():
            sides.setdefault(group, set()).add(name)
    new = range(first, len(groups))
    of = groups.tolist()  # the group of each row
    rows = {
        name: [row for row in new if brought[row] == name and sides.get(of[row], {name}) == {name}]
        for name in HELD
    }
    held = {of[row] for taken in rows.values() for row in taken}
    clean = [
        row
        for row in new
        if brought[row] in (None, "train")
        and of[row] not in held
        and sides.get(of[row], {"train"}) == {"train"}
    ]
    kept = {row for taken in (*rows.values(), clean) for row in taken}
    tied = [row for row in clean if of[row] in sides]
    free = [row for row in clean if of[row] not in sides]

    salt = blake2b(str(seed).encode(), digest_size=16).digest()
    smallest: dict[int, bytes] = {}
    for row in free:
        smallest[of[row]] = min(hashes[row], smallest.get(of[row], hashes[row]))
    order = sorted(smallest, key=lambda g: (blake2b(smallest[g], key=salt).digest(), g))

    if "val" not in brought:
        rows["val"], free = _carve(free, of, order, val_share)
    rows["dev"], free = _carve(free, of, order, dev_share)
    rows["train"] = sorted(free + tied)
    nothing = np.empty(0, np.int64)
    splits = {
        name: np.concatenate([settled.get(name, nothing), np.array(ids, np.int64)])
        for name, ids in rows.items()
    }
    dropped = np.array([row for row in new if row not in kept], np.int64)
    return {name: ids for name, ids in splits.items() if len(ids)}, dropped


def _carve(
    rows: list[int], of: list[int], order: list[int], share: float
) -> tuple[list[int], list[int]]:
    """Whole groups, as they come in the order and fit into the share; and the rows left."""
    sizes = Counter(of[row] for row in rows)
    room = int(share * len(rows))
    taken = set()
    for group in order:
        if 0 < sizes[group] <= room:
            taken.add(group)
            room -= sizes[group]
    inside = [row for row in rows if of[row] in taken]
    return inside, [row for row in rows if of[row] not in taken]
