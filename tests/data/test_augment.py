"""Augmentation: torchvision's arithmetic, the shares asked for, and the same at any time."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as reference

from pennyclip.data.augment import (
    PixelChanges,
    change_pixels,
    change_words,
    draw_pixel_changes,
)
from pennyclip.data.order import I64
from pennyclip.data.synonyms import Synonyms

N = 20_000
ROWS = np.arange(N)


def epochs(number: int, count: int = N) -> I64:
    return np.full(count, number)


def pictures(count: int) -> torch.Tensor:
    """Noise of many kinds of contrast, with black, white and gray ones, more than a chunk."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(count, 3, 9, 14, generator=generator)
    levels, spread = torch.rand(2, count, 3, 1, 1, generator=generator)
    images = (255 * (levels + spread * (noise - 0.5)).clamp(0, 1)).round().byte()
    images[0], images[1], images[2] = 0, 255, 127
    return images


def test_colours_change_as_torchvisions() -> None:
    images = pictures(80)
    factors = 0.4 + 1.2 * torch.rand(80, 3, generator=torch.Generator().manual_seed(1))
    changed = change_pixels(images, PixelChanges(torch.zeros(80, dtype=torch.bool), factors))
    for image, (brightness, contrast, saturation), found in zip(
        images, factors.tolist(), changed, strict=True
    ):
        # On numbers from 0 to 1, torchvision rounds nothing on the way.
        expected = reference.adjust_brightness(image.double() / 255, brightness)
        expected = reference.adjust_contrast(expected, contrast)
        expected = 255 * reference.adjust_saturation(expected, saturation)
        assert (found.double() - expected).abs().max() < 0.501
        # On whole numbers it rounds down at each of the three steps, and in the gray between.
        whole = reference.adjust_brightness(image, brightness)
        whole = reference.adjust_contrast(whole, contrast)
        whole = reference.adjust_saturation(whole, saturation)
        assert (found.int() - whole.int()).abs().max() <= 4
    assert (changed != images).float().mean() > 0.8


def test_only_the_pictures_drawn_are_mirrored_and_the_batch_stays_as_it_was() -> None:
    images = pictures(4)
    before = images.clone()
    flip = torch.tensor([False, True, False, True])
    changed = change_pixels(images, PixelChanges(flip, None))
    assert torch.equal(changed[0::2], images[0::2])
    for number in (1, 3):
        assert torch.equal(changed[number], reference.hflip(images[number]))
    change_pixels(images, PixelChanges(~flip, torch.full((4, 3), 1.3)))
    assert torch.equal(images, before)


def test_factors_and_flips_have_the_range_and_share_asked_for() -> None:
    drawn = draw_pixel_changes(0, epochs(0), ROWS, flip=0.3, jitter=0.1)
    assert abs(drawn.flip.float().mean() - 0.3) < 4 * (0.3 * 0.7 / N) ** 0.5
    assert drawn.jitter is not None
    assert 0.9 <= drawn.jitter.min() < 0.9005
    assert 1.0995 < drawn.jitter.max() <= 1.1
    np.testing.assert_allclose(drawn.jitter.mean(0), 1, atol=4 * 0.1 / (3 * N) ** 0.5)
    together = torch.corrcoef(torch.cat([drawn.jitter, drawn.flip[:, None].float()], 1).T)
    assert (together - torch.eye(4)).abs().max() < 4 / N**0.5
    assert draw_pixel_changes(0, epochs(0), ROWS, 0.0, 0.0).flip.sum() == 0


@pytest.mark.parametrize("part", [slice(0, 1), slice(5, 17), slice(None, None, -1)])
def test_a_sample_changes_alike_in_any_company(part: slice) -> None:
    rows, captions = np.arange(40), [f"the {n}th of many pictures here" for n in range(40)]
    whole = draw_pixel_changes(3, epochs(2, 40), rows, 0.5, 0.4)
    alone = draw_pixel_changes(3, epochs(2, 40)[part], rows[part], 0.5, 0.4)
    assert whole.jitter is not None
    assert alone.jitter is not None
    assert np.array_equal(whole.flip.numpy()[part], alone.flip.numpy())
    assert np.array_equal(whole.jitter.numpy()[part], alone.jitter.numpy())
    told = change_words(captions, 3, epochs(2, 40), rows, 0.3)
    assert told[part] == change_words(captions[part], 3, epochs(2, 40)[part], rows[part], 0.3)
    assert told != change_words(captions, 3, epochs(3, 40), rows, 0.3)
    assert told != change_words(captions, 4, epochs(2, 40), rows, 0.3)


def test_words_drop_out_by_the_share_and_keep_their_order() -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    caption = "  ".join(words)
    told = change_words([caption] * N, 0, epochs(0), ROWS, 0.1)
    lengths = np.array([len(one.split()) for one in told])
    assert abs(lengths.mean() - 9) < 4 * (0.9 / N) ** 0.5
    assert abs((lengths == 10).mean() - 0.9**10) < 4 * (0.35 * 0.65 / N) ** 0.5
    for one in told:
        assert one == caption or one == " ".join(w for w in words if w in one.split())
    share = [sum(word in one.split() for one in told) / N for word in words]
    np.testing.assert_allclose(share, 0.9, atol=4 * (0.09 / N) ** 0.5)


def test_one_word_always_stays() -> None:
    captions = ["dog", "a dog", "", " \n "]
    told = change_words(captions * 50, 0, epochs(0, 200), np.arange(200), 1.0)
    assert set(told[0::4]) == {"dog"}
    assert set(told[1::4]) == {"a", "dog"}
    assert set(told[2::4]) == {""}
    assert set(told[3::4]) == {" \n "}


def test_synonyms_replace_the_words_they_are_of(wordnet: Path) -> None:
    synonyms = Synonyms(wordnet)
    caption = 'A "red" Dog, big; not about'
    (told,) = change_words([caption], 0, epochs(0, 1), ROWS[:1], 0.0, 1.0, synonyms)
    assert told == 'A "ruddy" Dog, large; not about'
    many = change_words(["a dog runs"] * N, 0, epochs(0), ROWS, 0.0, 0.05, synonyms)
    kinds, counts = np.unique(many, return_counts=True)
    assert kinds.tolist() == ["a Canis familiaris runs", "a dog runs", "a domestic dog runs"]
    assert abs(counts[[0, 2]] - 0.025 * N).max() < 4 * (0.025 * N) ** 0.5


def test_shares_of_both_are_independent(wordnet: Path) -> None:
    many = change_words(["dog"] * N, 0, epochs(0), ROWS, 0.5, 0.5, Synonyms(wordnet))
    assert abs(sum(one == "dog" for one in many) / N - 0.5) < 4 * (0.25 / N) ** 0.5
