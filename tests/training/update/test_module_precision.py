"""Modules with a precision of their own: what really runs in which dtype."""

import math
from typing import Any

import pytest
import torch

from dtypes import BF16, FP16, FP32, one, spying
from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ModulePrecision
from pennyclip.training.update.precision import assign, own_precisions
from update_batches import adamw, gradients, pairs, tiny_clip, weights


def choices(**patterns: Any) -> list[ModulePrecision]:
    return [ModulePrecision(modules=m, precision=p) for m, p in patterns.items()]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "pure-bf16", "pure-fp16"])
@pytest.mark.parametrize("own", ["fp32", "bf16", "fp16"])
def test_a_named_module_really_computes_in_its_own_dtype(precision: Any, own: Any) -> None:
    model = tiny_clip()
    mine = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
    patterns = {
        "visual.trunk.blocks.0": own,
        "text.transformer.resblocks.1.mlp.c_fc": own,
        "visual.head": own,
        "text.token_embedding": own,
    }
    assign(model, precision, choices(**patterns))
    before = weights(model)
    with spying(model) as seen:
        record = one(model, pairs(4), precision=precision)
    assert math.isfinite(record["loss"])
    assert set(seen) > {"visual.trunk.blocks.0.mlp.fc1", "visual.trunk.blocks.1.mlp.fc1"}
    base = {**mine, "pure-bf16": BF16, "pure-fp16": FP16}[precision]
    layers = ("fc1", "fc2", "qkv", "c_fc", "c_proj", "head.proj", "patch_embed.proj", "out_proj")
    for name in (n for n in seen if n.endswith(layers)):
        module_own = name.startswith(tuple(patterns))
        assert seen[name] == {mine[own] if module_own else base}, name
    assert before.keys() == weights(model).keys()
    assert all(p.dtype == FP32 for p in model.parameters())


def test_in_float32_inside_bf16_a_block_computes_what_float32_computes() -> None:
    """Its input is the 16-bit one, its weights and its own arithmetic are float32's."""
    found = {}
    for precision in ("bf16", "pure-bf16"):
        model = tiny_clip()
        assign(model, precision, choices(**{"visual.trunk.blocks.1": "fp32"}))
        block = model.visual.trunk.blocks[1]
        block.register_forward_hook(lambda m, i, o: found.update(input=i[0], output=o))
        one(model, pairs(4), precision=precision, optimizer=adamw(model, lr=1e-12))
        given, result = found["input"], found["output"]
        with torch.no_grad():
            exact = block(given.float())
        if precision == "bf16":
            torch.testing.assert_close(result, exact, rtol=1e-6, atol=1e-6)
        else:
            assert given.dtype == BF16
            assert torch.equal(result, exact.bfloat16())


def test_a_whole_tower_can_leave_the_precision() -> None:
    model, exact = tiny_clip(), tiny_clip()
    assign(model, "pure-bf16", choices(visual="fp32", text="fp32"))
    batch = pairs(4)
    a, b = one(model, batch), one(exact, batch, precision="fp32")
    assert a["loss"] == b["loss"]
    assert all(torch.equal(g, gradients(exact)[n]) for n, g in gradients(model).items())


def test_outside_of_updates_nothing_is_changed() -> None:
    """Evaluation stays in float32, and a copy of the model is a model of its own."""
    from copy import deepcopy

    model, plain = tiny_clip().eval(), tiny_clip().eval()
    assign(model, "fp32", choices(**{"visual.*": "bf16", "text": "fp16"}))
    images = pairs(2).images
    assert torch.equal(model.visual(images), plain.visual(images))
    copy = deepcopy(model)
    with torch.no_grad():
        for p in copy.parameters():
            p.zero_()
    assert model.visual(images).norm() > 0 == copy.visual(images).norm()
    with own_precisions():
        assert model.visual(images).dtype == FP32
        assert not torch.equal(model.visual(images), plain.visual(images))


def test_the_first_pattern_counts_and_an_idle_one_is_refused() -> None:
    model = tiny_clip()
    named = {"visual.trunk.blocks.0": "fp32", "visual.trunk.*": "bf16"}
    assign(model, "fp32", choices(**named))
    with spying(model) as seen:
        one(model, pairs(4), precision="fp32")
    assert seen["visual.trunk.blocks.0.attn.qkv"] == {FP32}
    assert seen["visual.trunk.blocks.1.attn.qkv"] == {BF16}
    for wrong, near in (
        ("visual.trunk.block.0", "visual.trunk.blocks"),
        ("text.positional", "text"),
    ):
        with pytest.raises(RequestError, match=f"'{wrong}'.*{near}"):
            assign(model, "fp32", choices(**{wrong: "fp32"}))
    with pytest.raises(RequestError, match=r"no module is left that matches 'visual.trunk.norm'"):
        assign(tiny_clip(), "fp32", choices(**{"visual": "bf16", "visual.trunk.norm": "fp32"}))
