"""The order of rows: a permutation an epoch, and the same whatever one asks for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pennyclip.data.augment import choose_captions, crop_pixels, random_crops
from pennyclip.data.order import Order, mix, mixture


def stream(start: int, count: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    return Order(seed, np.array([size])).at(start, count)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 10))
def test_every_epoch_holds_each_row_once(size: int, seed: int, epoch: int) -> None:
    indices, epochs = stream(epoch * size, size, size, seed)
    assert np.array_equal(np.sort(indices), np.arange(size))
    assert (epochs == epoch).all()


@given(size=st.integers(1, 500), start=st.integers(0, 2000), cuts=st.lists(st.integers(1, 99)))
def test_batches_of_any_size_give_the_same_sequence(size: int, start: int, cuts: list[int]) -> None:
    whole, whole_epochs = stream(start, sum(cuts), size, seed=3)
    parts, position = [], start
    for cut in cuts:
        parts.append(stream(position, cut, size, seed=3))
        position += cut
    assert whole.tolist() == [i for part, _ in parts for i in part.tolist()]
    assert whole_epochs.tolist() == [e for _, part in parts for e in part.tolist()]


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    size = 2000
    first, second = stream(0, size, size, 0)[0], stream(size, size, size, 0)[0]
    other = stream(0, size, size, 1)[0]
    for a, b in ((first, second), (first, other), (first, np.arange(size))):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / size**0.5
        assert (a == b).sum() < 10  # one is expected by chance


def test_split_mix_has_the_published_values() -> None:
    # The first outputs of SplitMix64 from state 0 and 1 (its reference implementation's).
    assert [int(v) for v in mix(np.array([0], np.uint64))] == [0xE220A8397B1DCDAF]
    assert [int(v) for v in mix(np.array([1], np.uint64))] == [0x910A2DEC89025CC1]


def test_captions_are_drawn_evenly_and_anew_each_epoch() -> None:
    rows = np.arange(30_000)
    first = choose_captions(5, np.zeros_like(rows), rows, np.full_like(rows, 3))
    second = choose_captions(5, np.ones_like(rows), rows, np.full_like(rows, 3))
    counts = np.bincount(first, minlength=3)
    assert counts.sum() == 30_000
    assert (abs(counts - 10_000) < 4 * (30_000 * 2 / 9) ** 0.5).all()
    assert 0.30 < (first == second).mean() < 0.37


@pytest.mark.parametrize(("height", "width"), [(100, 300), (300, 100), (1, 50), (256, 256)])
def test_crops_lie_inside_and_keep_the_area_asked_for(height: int, width: int) -> None:
    rows = np.arange(500)
    for crop in random_crops(0, np.zeros_like(rows), rows, (0.5, 0.8)):
        top, left, bottom, right = crop_pixels(height, width, crop)
        assert 0 <= top < bottom <= height
        assert 0 <= left < right <= width
        assert (bottom - top) * (right - left) <= 0.8 * height * width + height + width


def test_crops_of_a_square_have_the_areas_and_shapes_asked_for() -> None:
    """Nothing is cut off at the edges: a crop of 0.7 is at most 0.97 of a side long."""
    rows = np.arange(4000)
    crops = random_crops(0, np.zeros_like(rows), rows, (0.5, 0.7))
    edges = np.array([crop_pixels(1000, 1000, crop) for crop in crops])
    high, wide = edges[:, 2] - edges[:, 0], edges[:, 3] - edges[:, 1]
    share, aspect = high * wide / 1e6, wide / high
    for found, low, most in ((share, 0.5, 0.7), (np.log(aspect), -np.log(4 / 3), np.log(4 / 3))):
        assert found.min() == pytest.approx(low, abs=0.003)
        assert found.max() == pytest.approx(most, abs=0.003)
        assert abs(found.mean() - (low + most) / 2) < 4 * (most - low) / (12 * len(rows)) ** 0.5
    for edge, length in ((edges[:, 0], high), (edges[:, 1], wide)):
        assert abs((edge / (1000 - length)).mean() - 0.5) < 4 / (12 * len(rows)) ** 0.5


def test_a_mixture_shows_each_source_as_often_as_its_weight_says() -> None:
    """Weights 2, 1, 0.3 and 0 over 10, 7, 20 and 5 rows: an epoch has 20 + 7 + 6 samples."""
    mixed = mixture(3, np.array([10, 7, 20, 5]), (2.0, 1.0, 0.3, 0.0))
    assert mixed.size == 33
    indices, rounds = mixed.at(0, 33 * 10)
    for epoch in range(10):
        seen = indices[epoch * 33 : (epoch + 1) * 33]
        counts = np.bincount(seen, minlength=42)
        assert (counts[:10] == 2).all()
        assert (counts[10:17] == 1).all()
        assert counts[17:37].sum() == 6
        assert (counts[37:] == 0).all()
    assert (np.bincount(indices, minlength=42)[17:37] == 3).all()  # 60 samples of 20 rows
    first = indices < 10
    assert sorted(zip(indices[first], rounds[first], strict=True)) == [
        (row, time) for row in range(10) for time in range(20)
    ]
    starts = [indices[epoch * 33 : epoch * 33 + 33].tolist() for epoch in range(3)]
    assert starts[0] != starts[1] != starts[2]
    assert np.abs(np.diff(np.flatnonzero(indices[:33] < 10))).max() < 20  # not one after the other


def test_a_mixture_is_a_pure_function_of_the_position() -> None:
    mixed = mixture(0, np.array([5, 3, 0]), (1.5, 1.0, 4.0))
    whole = mixed.at(0, 100)
    parts = [mixed.at(start, 7) for start in range(0, 98, 7)]
    for column in range(2):
        assert np.concatenate([part[column] for part in parts]).tolist() == list(whole[column][:98])
    assert mixture(1, np.array([5, 3, 0]), (1.5, 1.0, 4.0)).at(0, 100)[0].tolist() != list(whole[0])
    assert mixture(0, np.array([5, 3]), (0.01, 1.0)).takes.tolist() == [1, 3]
