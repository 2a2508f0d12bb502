"""Chance levels and the floor of the loss, against the losses themselves on simulated batches."""

import math

import numpy as np
import pytest
import torch

from pennyclip.loss.features import Features
from pennyclip.loss.infonce import infonce
from pennyclip.loss.multi_positive import multi_positive
from pennyclip.reporting.chance import chance

SIZES = [1] * 60 + [2] * 15 + [5] * 6 + [40]  # 160 rows
BATCH = 24


def batches(count: int) -> list[np.ndarray]:
    groups = np.repeat(np.arange(len(SIZES)), SIZES)
    generator = np.random.default_rng(0)
    return [generator.permutation(groups)[:BATCH] for _ in range(count)]


def features(embeddings: torch.Tensor, groups: np.ndarray, scale: float) -> Features:
    return Features(
        image=embeddings,
        text=embeddings,
        all_image=embeddings,
        all_text=embeddings,
        offset=0,
        scale=torch.tensor(scale, dtype=torch.float64),
        bias=None,
        groups=torch.from_numpy(groups),
    )


def test_losses_of_a_model_that_knows_nothing() -> None:
    found = chance(np.repeat(np.arange(len(SIZES)), SIZES), BATCH)
    one = torch.zeros(BATCH, 4, dtype=torch.float64)
    one[:, 0] = 1  # all embeddings are one
    masked, multi = [], []
    for groups in batches(800):
        masked.append(float(infonce(features(one, groups, 10.0))[0]))
        multi.append(float(multi_positive(features(one, groups, 10.0))[0]))
    alone = np.arange(BATCH)
    assert float(infonce(features(one, alone, 10.0))[0]) == pytest.approx(found.plain)
    assert found.plain == pytest.approx(math.log(BATCH))
    for values, expected in ((masked, found.masked), (multi, found.multi_positive)):
        error = np.std(values) / math.sqrt(len(values))
        assert error < 0.01
        assert abs(np.mean(values) - expected) < 4 * error
    assert found.multi_positive < found.masked - 0.3 < found.plain - 0.3


def test_the_loss_of_a_perfect_model_where_repeats_are_negatives() -> None:
    groups = np.repeat(np.arange(len(SIZES)), SIZES)
    floor = chance(groups, BATCH).floor
    vectors = torch.eye(len(SIZES), dtype=torch.float64)  # equal captions, equal embeddings
    values = []
    for some in batches(800):
        f = features(vectors[torch.from_numpy(some)], np.arange(BATCH), 200.0)
        values.append(float(infonce(f)[0]))
    error = np.std(values) / math.sqrt(len(values))
    assert abs(np.mean(values) - floor) < 4 * error
    assert floor > 0.3


def test_without_repeats_chance_is_the_logarithm_and_the_floor_is_zero() -> None:
    found = chance(np.arange(1000), 256)
    assert (found.masked, found.multi_positive) == pytest.approx((math.log(256),) * 2)
    assert found.floor == 0
    everything = chance(np.zeros(64, np.int64), 64)  # one caption for all
    assert everything.masked == pytest.approx(0)
    assert everything.floor == pytest.approx(math.log(64))
    assert everything.multi_positive == pytest.approx(0)
