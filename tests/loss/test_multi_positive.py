import math

import pytest
import torch
from loss_batches import features, leaves

from pennyclip.loss.infonce import infonce
from pennyclip.loss.multi_positive import multi_positive


def test_two_classes_of_four_with_perfect_embeddings():
    """peers.md, case 6."""
    x = leaves(8, 2, scale=100.0, dtype=torch.float32)
    classes = torch.tensor([0, 1]).repeat(4)
    x.image = x.text = torch.eye(2)[classes]
    assert multi_positive(features(x))[0].item() == pytest.approx(1.3863, abs=1e-4)
    assert multi_positive(features(x, classes))[0].item() == pytest.approx(0, abs=1e-12)


def test_constant_embeddings_cost_the_share_of_the_group():
    """Eight equal candidates, four of them positives: -log(1/2)."""
    x = leaves(8, 4, dtype=torch.float32)
    x.image = x.text = torch.full((8, 4), 0.5)
    classes = torch.tensor([0, 1]).repeat(4)
    value, _ = multi_positive(features(x, classes))
    assert value.item() == pytest.approx(math.log(2), abs=1e-6)


def test_is_infonce_where_every_row_is_its_own_group():
    x, y = leaves(30), leaves(30)
    value, expected = multi_positive(features(x))[0], infonce(features(y))[0]
    value.backward()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(x.image.grad, y.image.grad)
    torch.testing.assert_close(x.scale.grad, y.scale.grad)


def test_one_group_alone_costs_nothing_and_teaches_nothing():
    x = leaves(6)
    value, metrics = multi_positive(features(x, torch.zeros(6, dtype=torch.int64)))
    value.backward()
    assert value.item() == 0.0
    assert not any(g.any() for g in x.gradients())
    assert metrics["accuracy"] == 1


def test_gradients_are_supcons_l_in():
    """Khosla et al., equation 3: the mean over positives inside the logarithm, a constant off."""
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
    x, y = leaves(8), leaves(8)
    value, _ = multi_positive(features(x, groups))
    value.backward()
    same = (groups[:, None] == groups[None]).double()
    probabilities = (y.scale * y.image @ y.text.T).exp()
    l_in = [
        -((p * same).sum(1) / same.sum(1) / p.sum(1)).log().mean()
        for p in (probabilities, probabilities.T)
    ]
    ((l_in[0] + l_in[1]) / 2).backward()
    torch.testing.assert_close(x.image.grad, y.image.grad)
    torch.testing.assert_close(x.text.grad, y.text.grad)
    constant = same.sum(1).log().mean().item()
    assert value.item() == pytest.approx(((l_in[0] + l_in[1]) / 2).item() - constant, rel=1e-9)
