import math

import open_clip
import pytest
import torch
from loss_batches import features, leaves

from pennyclip.loss import LOSSES
from pennyclip.loss.infonce import infonce


def test_constant_embeddings_cost_the_logarithm_of_the_candidates():
    x = leaves(8, 4, dtype=torch.float32)
    x.image = x.text = torch.full((8, 4), 0.5)
    assert infonce(features(x))[0].item() == pytest.approx(math.log(8), abs=1e-6)


def test_two_classes_of_four_with_perfect_embeddings():
    """peers.md, case 6: each of four equal texts gets a quarter, unless the others are left out."""
    x = leaves(8, 2, scale=100.0, dtype=torch.float32)
    classes = torch.tensor([0, 1]).repeat(4)
    x.image = x.text = torch.eye(2)[classes]
    assert infonce(features(x))[0].item() == pytest.approx(1.3863, abs=1e-4)
    assert infonce(features(x, classes))[0].item() == pytest.approx(0, abs=1e-12)


def test_a_batch_of_one_costs_nothing():
    value, _ = infonce(features(leaves(1)))
    assert value.item() == 0.0


def test_two_pairs_by_hand():
    """Cosines of 0.6 with the own text and -0.6 with the other, scale 5: log(1 + e^-6)."""
    x = leaves(2, 2, scale=5.0)
    image = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    x.image = image.clone().requires_grad_()
    x.text = torch.tensor([[0.6, 0.8], [-0.6, 0.8]], dtype=torch.float64).requires_grad_()
    value, metrics = infonce(features(x))
    value.backward()
    assert value.item() == pytest.approx(math.log1p(math.exp(-6)), rel=1e-12)
    # d/dscale of log(1 + exp(-1.2 scale))
    assert x.scale.grad.item() == pytest.approx(-1.2 / (1 + math.exp(6)), rel=1e-12)
    assert metrics["accuracy"] == 1


def test_equals_open_clip():
    mine, theirs = (leaves(40, 32, scale=1 / 0.07, dtype=torch.float32) for _ in range(2))
    value, _ = infonce(features(mine))
    expected = open_clip.ClipLoss()(theirs.image, theirs.text, theirs.scale)
    value.backward()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(mine.image.grad, theirs.image.grad, rtol=0, atol=1e-6)
    torch.testing.assert_close(mine.text.grad, theirs.text.grad, rtol=0, atol=1e-6)
    torch.testing.assert_close(mine.scale.grad, theirs.scale.grad, rtol=0, atol=1e-6)


def test_temperature_starts_and_ends_where_clip_has_it():
    assert LOSSES["infonce"].initial_scale == pytest.approx(14.2857, abs=1e-4)
    assert LOSSES["infonce"].max_scale == 100
    assert LOSSES["infonce"].initial_bias is None
