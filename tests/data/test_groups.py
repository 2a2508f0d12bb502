import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pennyclip.data.groups import group_rows, normalised, split_rows, with_labels


def test_rows_that_share_a_key_share_a_group_also_through_others() -> None:
    keys = [[b"a"], [b"b", b"c"], [b"d"], [b"c", b"a"], [b"e"], [b"d"], []]
    assert group_rows(keys).tolist() == [0, 0, 2, 0, 4, 2, 6]


@given(st.lists(st.lists(st.integers(0, 12), max_size=3), max_size=25))
def test_groups_are_the_connected_components(keys: list[list[int]]) -> None:
    groups = group_rows([[bytes([key]) for key in own] for own in keys]).tolist()
    expected = list(range(len(keys)))  # smallest row reachable, by brute force
    for _ in keys:
        for i, a in enumerate(keys):
            for j, b in enumerate(keys):
                if set(a) & set(b):
                    expected[i] = expected[j] = min(expected[i], expected[j])
    assert groups == expected


def test_captions_are_compared_by_letters_and_single_spaces() -> None:
    assert normalised("  A Dog,\t running ") == normalised("a dog, RUNNING")
    assert normalised("a dog") != normalised("a dog.")
    assert normalised("STRASSE") == normalised("straße")


def hashes(count: int) -> list[bytes]:
    return [bytes([i * 37 % 251, i]) for i in range(count)]


def split(groups: list[int], brought: list[str | None], **shares: object):  # type: ignore[no-untyped-def]
    options = {"val_share": 0.1, "dev_share": 0.1, "seed": 0} | shares
    found, dropped = split_rows(np.array(groups), brought, hashes(len(groups)), **options)
    return {name: rows.tolist() for name, rows in found.items()}, dropped.tolist()


def test_val_and_dev_are_carved_from_train_by_whole_groups() -> None:
    groups = [row - row % 2 for row in range(100)]
    found, dropped = split(groups, [None] * 100)
    assert dropped == []
    assert {name: len(rows) for name, rows in found.items()} == {"val": 10, "dev": 8, "train": 82}
    assert sorted(row for rows in found.values() for row in rows) == list(range(100))
    for rows in found.values():
        assert rows == sorted(rows)
        assert all((row ^ 1) in rows for row in rows)
    again, _ = split(groups, [None] * 100)
    other, _ = split(groups, [None] * 100, seed=1)
    assert found == again
    assert found["val"] != other["val"]


def test_a_split_that_the_source_brings_wins() -> None:
    brought = ["val"] * 20 + ["test"] * 5 + ["train"] * 40 + [None] * 35
    found, dropped = split(list(range(100)), brought)
    assert found["val"] == list(range(20))
    assert found["test"] == list(range(20, 25))
    assert len(found["dev"]) == 7  # a tenth of the 75 others
    assert len(found["train"]) == 68
    assert dropped == []


def test_train_rows_whose_group_reaches_into_val_are_dropped() -> None:
    groups = [0, 0, 0, 3, 4, 3, 6]
    found, dropped = split(groups, ["val", "train", None, "test", "train", "train", "train"])
    assert found == {"val": [0], "test": [3], "train": [4, 6]}
    assert dropped == [1, 2, 5]


def test_what_is_too_small_for_a_share_has_no_val_and_no_dev() -> None:
    assert split(list(range(9)), [None] * 9) == ({"train": list(range(9))}, [])
    assert split([0] * 50, [None] * 50)[0] == {"train": list(range(50))}


def test_appended_rows_leave_the_others_where_they_are() -> None:
    """Rows 0 to 5 are settled. 6 repeats a train row, 7 a val row, 8 (of the source's val) a train
    row, 9 (of its val) a val row, 10 links train and val; 11 to 30 repeat nothing."""
    settled = {"train": np.array([0, 1, 2]), "val": np.array([3, 4]), "dev": np.array([5])}
    groups = [0, 1, 2, 3, 2, 5, 0, 3, 1, 3, 2, *range(11, 31)]
    brought = [None] * 8 + ["val", "val", None] + [None] * 20
    found, dropped = split(groups, brought, settled=settled, first=6)
    assert dropped == [7, 8, 10]
    assert found["val"] == [3, 4, 9]
    assert found["dev"][0] == 5
    assert len(found["dev"]) == 3  # a tenth of the 20 that repeat nothing
    assert found["train"][:4] == [0, 1, 2, 6]
    assert sorted(row for rows in found.values() for row in rows) == sorted(
        set(range(31)) - {7, 8, 10}
    )
    carved, _ = split(groups, [None] * 31, settled=settled, first=6)
    assert len(carved["val"]) == 2 + 2


def test_pictures_of_one_class_are_one_group_and_may_be_parted() -> None:
    groups = np.array([0, 1, 2, 3, 4])
    labels = ["cat", "Cat", None, "dog", None]
    captions = [["a cat"], ["a cat"], ["a DOG"], ["a dog"], ["else"]]
    assert with_labels(groups, labels, captions).tolist() == [0, 0, 2, 2, 4]
    assert with_labels(groups, [None] * 5, captions) is groups
    shared = np.array([0, 1, 2, 0, 1])  # row 3 shows what row 0 does, and row 4 what row 1 does
    assert with_labels(shared, labels, captions).tolist() == [0, 0, 2, 2, 0]
