"""Stores of float16 values: what is written is read, and what cannot be kept is refused."""

from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pennyclip.data import stored
from pennyclip.data.stored import NotStored, States, Stored, create, find


def parts(values: torch.Tensor, order: np.ndarray, size: int) -> Iterator:
    for start in range(0, len(order), size):
        places = order[start : start + size]
        yield places, values[torch.from_numpy(places)]


def test_values_come_back_by_their_places(tmp_path: Path) -> None:
    values = torch.randn(10, 3, 4, generator=torch.manual_seed(0))
    order = np.random.default_rng(0).permutation(10)
    assert find(tmp_path / "store") is None
    written = create(tmp_path / "store", 10, parts(values, order, 3))
    assert written.dtype == np.float16
    found = find(tmp_path / "store")
    assert found is not None
    assert np.array_equal(found, values.half().numpy())
    entries, lengths = Stored(found, 2, 224).take(np.array([7, 1]))
    assert torch.equal(entries, values[[7, 1]].half())
    assert lengths is None


def test_captions_keep_their_own_lengths() -> None:
    sizes = [3, 0, 9, 5]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    values = np.arange(17 * 2, dtype=np.float16).reshape(17, 2)
    entries, lengths = Stored(values, 2, 12, starts).take(np.array([2, 0]))
    assert entries.shape == (2, 12, 2)  # 9 rounded up to 16, and no more than 12
    assert lengths is not None
    assert lengths.tolist() == [9, 3]
    assert np.array_equal(entries[0, :9], values[3:12])
    assert np.array_equal(entries[1, :3], values[:3])
    assert not entries[0, 9:].any()
    assert not entries[1, 3:].any()


def test_states_are_cut_and_moved_like_tensors() -> None:
    states = States(torch.randn(5, 2, 3), 4)
    assert torch.equal(states[slice(1, 3)].values, states.values[1:3])
    assert states[slice(1, 3)].layers == 4
    assert states.to(torch.device("meta")).values.is_meta


@pytest.mark.parametrize("worst", [7e4, torch.inf, torch.nan])
def test_what_float16_cannot_hold_is_refused(tmp_path: Path, worst: float) -> None:
    values = torch.ones(4, 2)
    values[3, 1] = worst
    with pytest.raises(NotStored, match=r"\[2, 3\].*65,504.*largest is"):
        create(tmp_path / "store", 4, parts(values, np.arange(4), 2))
    assert not list(tmp_path.iterdir())


def test_a_store_may_take_half_of_the_free_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, free = namedtuple("usage", "free"), 16_000_000
    monkeypatch.setattr(stored.shutil, "disk_usage", lambda path: usage(free))
    width = free // 2 // (10 * 2)

    def one(width: int) -> Iterator:
        return parts(torch.ones(10, width), np.arange(10), 10)

    create(tmp_path / "fits", 10, one(width))
    with pytest.raises(NotStored, match=r"0\.008 GB, more than 50% of the 0\.016 GB.*free in"):
        create(tmp_path / "store", 10, one(width + 1))
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]


def test_a_disk_that_is_full_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the space taken beforehand, the first write beyond it would kill the process."""

    def refuse(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored.os, "posix_fallocate", refuse)
    with pytest.raises(NotStored, match="No space left"):
        create(tmp_path / "store", 4, parts(torch.ones(4, 2), np.arange(4), 4))
    assert not list(tmp_path.iterdir())
