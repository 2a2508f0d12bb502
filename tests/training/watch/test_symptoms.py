"""What is said at the end of a run that knows nothing."""

import numpy as np
import pytest
import torch

from pennyclip.evaluation.retrieval import mean_chance, retrieval
from pennyclip.training.watch.symptoms import no_better_than_guessing

IMAGES = 300


def guessed(seed: int) -> float:
    """The mean recall of embeddings that have nothing to do with each other."""
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.nn.functional.normalize(
        torch.randn(2, IMAGES, 64, generator=generator), dim=-1
    )
    return retrieval(image, text, torch.arange(IMAGES)).metrics["mean_recall"]


def test_guessing_is_named_and_what_was_learnt_is_not() -> None:
    chance = mean_chance(IMAGES, IMAGES)
    assert chance == pytest.approx((1 + 5 + 10) / 3 / IMAGES)
    scores = [guessed(seed) for seed in range(40)]
    assert np.mean(scores) == pytest.approx(chance, rel=0.1)
    # Said to be 1.3 times smaller than the standard error that is reckoned with, at least.
    assert np.std(scores) < (chance * (1 - chance) / IMAGES) ** 0.5 / 1.2
    found = [no_better_than_guessing(score, chance, IMAGES, False) for score in scores]
    named = [symptom.message for symptom in found if symptom]
    assert len(named) >= 38  # of 40: two standard errors
    assert all("can't be told from guessing (1.8%)" in message for message in named)
    assert no_better_than_guessing(2.2 * chance, chance, IMAGES, False) is None


def test_alike_embeddings_are_named_without_a_score() -> None:
    symptom = no_better_than_guessing(None, 0.0, 0, True)
    assert symptom is not None
    assert symptom.message == "at the end the embeddings of different pairs are alike"
    assert no_better_than_guessing(None, 0.0, 0, False) is None


def test_few_images_say_nothing() -> None:
    chance = mean_chance(26, 26)
    assert chance > 0.2 > mean_chance(27, 27)
    assert no_better_than_guessing(chance, chance, 26, False) is None
