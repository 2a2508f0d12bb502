import math

import open_clip.loss
import pytest
import torch
from loss_batches import features, leaves

from pennyclip.loss import LOSSES
from pennyclip.loss.sigmoid import sigmoid


def test_constant_embeddings_by_hand():
    """All logits are 20 - 5 = 15: a positive costs ln(1 + e^-15), 7 negatives ln(1 + e^15)."""
    x = leaves(8, 4, dtype=torch.float32)
    x.image = x.text = torch.full((8, 4), 0.5)
    value, _ = sigmoid(features(x))
    expected = math.log1p(math.exp(-15)) + 7 * math.log1p(math.exp(15))
    assert value.item() == pytest.approx(expected, rel=1e-6)


def test_starts_where_the_paper_does():
    """At t = 10, b = -10 orthogonal negatives cost little: what a row pays is its own pair."""
    loss = LOSSES["sigmoid"]
    assert (loss.initial_scale, loss.initial_bias) == (10.0, -10.0)
    x = leaves(4, 8, scale=loss.initial_scale)
    x.bias = torch.tensor(loss.initial_bias, dtype=torch.float64)
    x.image, x.text = torch.eye(8, dtype=torch.float64)[:4], torch.eye(8, dtype=torch.float64)[4:]
    value, _ = loss.compute(features(x))
    expected = math.log1p(math.exp(10)) + 3 * math.log1p(math.exp(-10))
    assert value.item() == pytest.approx(expected, rel=1e-9)


def test_temperature_has_no_bound():
    log_scale = torch.tensor(7.0)
    log_scale.clamp_(max=math.log(LOSSES["sigmoid"].max_scale))
    assert log_scale.item() == 7.0


def test_equals_open_clip():
    mine, theirs = (leaves(40, 32, scale=10.0, dtype=torch.float32) for _ in range(2))
    value, _ = sigmoid(features(mine))
    expected = open_clip.loss.SigLipLoss()(theirs.image, theirs.text, theirs.scale, theirs.bias)
    value.backward()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    for found, wanted in zip(mine.gradients(), theirs.gradients(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_rows_of_a_group_are_left_out():
    """Two equal rows of one group: the two positives remain, the two cross pairs cost nothing."""
    x = leaves(2, 4)
    x.image = x.text = torch.full((2, 4), 0.5, dtype=torch.float64)
    value, _ = sigmoid(features(x, torch.tensor([3, 3])))
    assert value.item() == pytest.approx(math.log1p(math.exp(-15)), rel=1e-9)


def test_needs_a_bias():
    x = leaves(4)
    x.bias = None
    with pytest.raises(AssertionError, match="bias"):
        sigmoid(features(x))
