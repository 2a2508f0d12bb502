"""Weights and gradients of 16 bits: what they keep and lose."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from dtypes import BF16, FP16, FP32, one, spying
from pennyclip.config.file import load_recipe
from pennyclip.config.keys import ClipText
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import freeze
from pennyclip.optim import OPTIMIZERS
from pennyclip.optim.groups import parameter_groups
from pennyclip.training.update.narrow import narrowed, round_weights
from update_batches import adamw, gradients, pairs, tiny_clip, weights


@pytest.mark.parametrize(("precision", "dtype"), [("pure-bf16", BF16), ("pure-fp16", FP16)])
def test_weights_and_gradients_have_16_bits_while_gradients_are_computed(
    precision: Any, dtype: torch.dtype
) -> None:
    model, found = tiny_clip(), {}
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name, p=p: found.setdefault(name, (p.dtype, g.dtype)) and g)
    with spying(model) as seen:
        one(model, pairs(4), precision=precision)
    assert found.pop("logit_scale") == (FP32, FP32)
    assert set(found) == {n for n, _ in model.named_parameters()} - {"logit_scale"}
    assert set(found.values()) == {(dtype, dtype)}
    assert all(p.dtype == p.grad.dtype == FP32 for p in model.parameters())
    layers = {n for n in seen if n.endswith(("fc1", "norm1", "patch_embed.proj", "c_fc", "ln_1"))}
    assert len(layers) == 2 * 2 + 1 + 2 * 2
    assert all(seen[name] == {dtype} for name in layers)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_move_as_float32_weights_would_on_the_same_gradients(name: str) -> None:
    """Ten updates: the optimizer sees float32 gradients and float32 weights, nothing else."""
    model = tiny_clip()
    twin = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    from pennyclip.config.keys import Optim

    config = Optim(lr=1e-3)
    mine = OPTIMIZERS[name](parameter_groups(model.named_parameters(), {}, config), config)
    other = OPTIMIZERS[name](parameter_groups(twin.items(), {}, config), config)
    for number in range(10):
        one(model, pairs(4, number), optimizer=mine)
        for n, gradient in gradients(model).items():
            twin[n].grad = gradient
        assert all(
            torch.equal(g, g.bfloat16().float()) for g in gradients(model).values() if g.ndim
        )
        other.step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p, twin[n], rtol=0, atol=0)
        for value in mine.state[p].values():
            assert not torch.is_tensor(value) or value.dtype == FP32
    moved = [p for p in model.parameters() if p.ndim > 1]
    assert not any(torch.equal(p, p.bfloat16().float()) for p in moved)


def test_small_steps_that_bfloat16_would_lose_add_up_in_masters() -> None:
    model = tiny_clip()
    p = model.visual.head.proj.weight
    before = p.detach().clone()
    optimizer = adamw(model, lr=1e-6)  # Adam's steps: far below 1/512 of a weight of 0.07
    for number in range(8):
        one(model, pairs(4, number), optimizer=optimizer)
    moved = (p - before).abs()
    assert (p.bfloat16() == before.bfloat16()).float().mean() > 0.95
    assert moved.median() > 1e-6


def test_the_gradient_is_that_of_float32_within_16_bits() -> None:
    found = {}
    for precision in ("fp32", "pure-bf16", "pure-fp16"):
        model = tiny_clip()
        one(model, pairs(6), precision=precision)
        found[precision] = torch.cat([g.flatten() for g in gradients(model).values()])
    exact = found["fp32"]
    errors = {name: float((g - exact).norm() / exact.norm()) for name, g in found.items()}
    assert 1e-3 < errors["pure-bf16"] < 0.05
    assert 1e-4 < errors["pure-fp16"] < 0.007


def test_an_error_inside_gives_the_masters_back() -> None:
    model = tiny_clip()
    before = weights(model)
    broken = pairs(4, images=torch.zeros(4, 3, 65, 65, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="65"):
        one(model, broken, precision="pure-fp16")
    assert all(torch.equal(v, before[n]) and v.dtype == FP32 for n, v in weights(model).items())


def test_micro_batches_add_up_in_float32() -> None:
    """48 of them: in bfloat16, what comes last would hardly count any more."""
    whole, parts = tiny_clip(), tiny_clip()
    batch = pairs(48)
    one(whole, batch, precision="fp32")
    one(parts, batch, micro_batch=1)
    reference, found = gradients(whole), gradients(parts)
    worst = max(
        float((found[n] - g).norm() / g.norm()) for n, g in reference.items() if g.norm() > 1e-4
    )
    assert worst < 0.06
    assert any(not torch.equal(g, g.bfloat16().float()) for g in found.values())


@pytest.mark.parametrize(
    "trunk",
    [
        "efficientnet_lite0",
        "convnext_atto",
        "eva02_tiny_patch14_224",
        "resnet18",
        "vit_tiny_patch16_224",
    ],
)
def test_all_kinds_of_trunks_run_in_it(trunk: str) -> None:
    from pennyclip.config.keys import ImageTower, Model

    torch.manual_seed(0)
    size = 56 if "eva" in trunk else 64
    image = ImageTower(name=trunk, image_size=size, head="mlp")
    text = ClipText(width=32, heads=2, layers=1, context_length=16, vocab_size=100)
    model = CLIP(Model(image=image, text=text, embed_dim=24)).train()
    images = torch.randint(256, (4, 3, size, size), dtype=torch.uint8)
    with spying(model) as seen:
        record = one(model, pairs(4, images=images))
    assert math.isfinite(record["loss"])
    dtypes = {n: s for n, s in seen.items() if n.startswith("visual.trunk")}
    norms = {n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert all(s == {BF16} for n, s in dtypes.items() if n not in norms)
    for name in norms:
        module = model.get_submodule(name)
        assert module.running_var.dtype == module.weight.dtype == FP32
        assert module.num_batches_tracked == 1


def test_a_transformers_text_tower_runs_in_it() -> None:
    from pennyclip.weights.build import build

    recipe = load_recipe("frozen-lite0-minilm")
    model, _ = build(recipe.model, 0, 1 / 0.07, 0.0)
    freeze(model, "none", 1)
    stored = {
        "image_features": torch.randn(4, 1280, generator=torch.Generator().manual_seed(0)),
        "tokens": torch.randint(1000, 20_000, (4, 16)),
    }
    narrow = set()
    model.visual.trunk.conv_stem.weight.requires_grad_(False)
    with spying(model) as seen:
        p = model.visual.trunk.conv_stem.weight
        model.text.proj.register_forward_hook(lambda *_: narrow.add(p.dtype))
        record = one(model, pairs(4, **stored))
    assert math.isfinite(record["loss"])
    assert narrow == {FP32}  # an idle trunk is not cast in every update
    layers = {n for n in seen if isinstance(model.get_submodule(n), nn.Linear | nn.LayerNorm)}
    assert len(layers) > 6 * 8
    assert all(seen[name] == {BF16} for name in layers)
    assert seen["visual.head.proj"] == {BF16}


# Stochastic rounding, without masters.


def test_without_masters_weights_are_bfloat16s_values_and_keep_their_mean() -> None:
    p = nn.Parameter(torch.linspace(0.5, 0.6, 7).repeat(20_000, 1))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Module()
            self.layer.weight = p

    exact = p.detach()[0].clone()
    round_weights(Holder(), "pure-bf16", seed=3)
    assert torch.equal(p, p.bfloat16().float())
    step = 2.0**-8  # between two bfloat16 values in [0.5, 1)
    assert ((p - exact).abs() < step).all()
    assert ((p.mean(0) - exact).abs() < 5 * step / 2 / 20_000**0.5).all()
    again = nn.Parameter(exact.repeat(20_000, 1))
    holder = Holder()
    holder.layer.weight = again
    round_weights(holder, "pure-bf16", seed=3)
    assert torch.equal(again, p)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_steps_far_below_a_weights_spacing_are_made_on_average(name: str) -> None:
    from pennyclip.config.keys import Optim

    model = tiny_clip()
    config = Optim(lr=2e-5, weight_decay=0.0)
    optimizer = OPTIMIZERS[name](parameter_groups(model.named_parameters(), {}, config), config)
    p = model.text.token_embedding.weight
    p.data = torch.full_like(p, 0.5)  # neighbours: 0.498 and 0.504
    with torch.no_grad():
        p.copy_(p.bfloat16().float())
    generator = torch.Generator().manual_seed(0)
    for number in range(4):
        for q in model.parameters():
            q.grad = torch.randn(q.shape, generator=generator).abs()
        optimizer.step()
        round_weights(model, "pure-bf16", seed=number)
    assert torch.equal(p, p.bfloat16().float())
    drift = (p.detach() - 0.5).mean().item()
    assert drift < 0
    if name == "adamw":  # each step is the rate, up to what Adam makes of |g|
        assert 4 * 2e-5 * 0.7 < -drift < 4 * 2e-5 * 1.2
    assert model.logit_scale.dtype == FP32


def test_masters_are_really_gone() -> None:
    model = tiny_clip()
    p = model.visual.head.proj.weight
    fine = p.detach().clone()
    frozen = model.text.positional_embedding.requires_grad_(False)
    kept = frozen.detach().clone()
    with narrowed(model, "pure-bf16", masters=False):
        assert p.dtype == frozen.dtype == BF16
    assert torch.equal(p, fine.bfloat16().float())
    assert not torch.equal(p, fine)
    assert torch.equal(frozen, kept)  # what does not learn loses nothing
