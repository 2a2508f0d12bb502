"""What all losses have in common: exact, in little memory, and the same over several ranks."""

import math

import pytest
import torch
from loss_batches import features, leaves, pairs_of_three, ranks
from loss_reference import PLAIN
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pennyclip.loss.tiles as tiles
from pennyclip.loss import LOSSES

NAMES = list(LOSSES)


def differ(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest error, relative to the largest value of each."""
    assert len(found) == len(expected)
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.fixture(params=[4, 7, 1024])
def tile(request, monkeypatch) -> int:
    """Several tiles with a remainder, and a single one."""
    monkeypatch.setattr(tiles, "TILE", request.param)
    return request.param


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradients_are_those_of_the_whole_matrix(name, tile):
    groups = pairs_of_three(23)
    mine, other = leaves(), leaves()
    value, _ = LOSSES[name].compute(features(mine, groups))
    expected = PLAIN[name](features(other, groups))
    (3 * value).backward()  # not 1: the factor from above is applied
    (3 * expected).backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    assert differ(mine.gradients(), other.gradients()) < 1e-11
    assert len(mine.gradients()) == (4 if name == "sigmoid" else 3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_mean_over_ranks_is_the_single_process(name, count, tile):
    groups = pairs_of_three(12)
    mine, other = leaves(12), leaves(12)
    parts = [LOSSES[name].compute(f) for f in ranks(mine, count, groups)]
    mean = torch.stack([value for value, _ in parts]).mean()
    whole, metrics = LOSSES[name].compute(features(other, groups))
    mean.backward()
    whole.backward()
    assert mean.item() == pytest.approx(whole.item(), rel=1e-12)
    assert differ(mine.gradients(), other.gradients()) < 1e-11
    accuracy = torch.stack([part["accuracy"] for _, part in parts]).mean()
    assert accuracy.item() == pytest.approx(metrics["accuracy"].item())
    assert {part["candidates"] for _, part in parts} == {12.0}


@pytest.mark.parametrize("name", NAMES)
def test_ranks_without_gathered_gradients_get_their_own_rows_gradient(name):
    mine, other = leaves(8), leaves(8)
    for x, compute in ((mine, lambda f: LOSSES[name].compute(f)[0]), (other, PLAIN[name])):
        f = ranks(x, 2, torch.arange(8))[1]
        object.__setattr__(f, "all_image", f.all_image.detach())
        object.__setattr__(f, "all_text", f.all_text.detach())
        compute(f).backward()
    assert differ([mine.image.grad, mine.scale.grad], [other.image.grad, other.scale.grad]) < 1e-11
    assert not mine.image.grad[:4].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [100.0, 1000.0])
def test_large_logits_neither_overflow_nor_lose_the_value(name, scale, tile):
    groups = pairs_of_three(23)
    mine, other = leaves(scale=scale, dtype=torch.float32), leaves(scale=scale)
    value, _ = LOSSES[name].compute(features(mine, groups))
    expected = PLAIN[name](features(other, groups))
    value.backward()
    expected.backward()
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert all(torch.isfinite(g).all() for g in mine.gradients())
    assert differ([g.double() for g in mine.gradients()], other.gradients()) < 1e-3 * scale / 100


@pytest.mark.parametrize("name", NAMES)
def test_opposite_pairs_at_a_scale_of_1000_cost_their_logits(name):
    """Every text is the opposite of its image: the worst logits there are."""
    x = leaves(2, scale=1000.0, dtype=torch.float32)
    image = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    x.image, x.text = image.clone().requires_grad_(), (-image).requires_grad_()
    value, metrics = LOSSES[name].compute(features(x))
    value.backward()
    # Softmax: 1000 - (-1000). Sigmoid: one negative at 1000 - 5 and the positive at -1000 - 5.
    assert value.item() == pytest.approx(2000.0)
    assert metrics["accuracy"] == 0
    assert all(torch.isfinite(g).all() for g in x.gradients())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_as_large_as_the_matrix(name, monkeypatch):
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for item in out if isinstance(out, tuple | list) else (out,):
                if isinstance(item, Tensor):
                    self.elements = max(self.elements, item.numel())
            return out

    monkeypatch.setattr(tiles, "TILE", 16)
    n, dim = 200, 8
    x = leaves(n, dim)
    f = features(x, pairs_of_three(n))
    with Largest() as whole:
        PLAIN[name](f).backward()
    with Largest() as tiled:
        LOSSES[name].compute(f)[0].backward()
    assert whole.elements == n * n
    assert tiled.elements <= n * dim


@pytest.mark.parametrize("name", NAMES)
def test_a_collapsed_model_finds_nothing(name):
    x = leaves(50, 512, dtype=torch.float32)
    x.image = x.text = x.image[:1].detach().expand(50, -1).contiguous().requires_grad_()
    _, metrics = LOSSES[name].compute(features(x))
    assert metrics["accuracy"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_that_are_not_numbers_are_not_a_success(name):
    x = leaves(dtype=torch.float32)
    x.image = torch.full_like(x.image, torch.nan).requires_grad_()
    value, metrics = LOSSES[name].compute(features(x))
    assert math.isnan(value.item())
    assert metrics["accuracy"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_accuracy_counts_what_is_found(name):
    """Images 0 and 1 of four have exchanged their texts; each other pair is perfect."""
    x = leaves(4, dtype=torch.float32)
    x.image, x.text = torch.eye(4), torch.eye(4)[[1, 0, 2, 3]]
    apart = LOSSES[name].compute(features(x))[1]
    assert apart["accuracy"] == 0.5
    assert apart["candidates"] == 4
    together = LOSSES[name].compute(features(x, torch.tensor([7, 7, 8, 9])))[1]
    # As positives they find each other; left out, all are at 0 and the two are tied.
    assert together["accuracy"] == (1.0 if name == "multi_positive" else 0.5)
