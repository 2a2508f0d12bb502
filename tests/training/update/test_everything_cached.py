"""Gradient caching beside all that a recipe can combine it with, at once."""

from typing import Any

import pytest
import torch

from pennyclip.config.keys import ActivationCheckpointing, Adapters, Lora, LossScaling, Precision
from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import freeze
from pennyclip.model.lora import adapt
from pennyclip.model.masking import keep_indices
from pennyclip.model.recompute import recompute
from pennyclip.training.telemetry.gradients import LayerGradients
from pennyclip.training.update.compilation import compiled_blocks
from pennyclip.training.update.scaling import LossScaler
from pennyclip.training.update.update import update
from update_batches import SIZE, adamw, gradients, pairs, tiny_clip

COUNT, MICRO = 10, 4  # the last micro-batch is smaller


def gradients_of(
    micro_batch: int | None, precision: Precision, *, compiled: bool | None = None, lora: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Of one update of a partly frozen, masked model; unless `compiled` is None, with its blocks
    computed again in the backward pass, perhaps compiled, and the loss scaled."""
    model: CLIP = tiny_clip(bias=True)
    if lora:
        adapt(model, Adapters(image=Lora(rank=2, dropout=0.0), text=Lora(rank=2)), 0)
        for name, parameter in model.named_parameters():  # B starts at 0
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    freeze(model, 1, 1)
    scaler = None
    if compiled is not None:
        recompute(model, ActivationCheckpointing(image="all", text="all"))
        for block in compiled_blocks(model) if compiled else []:
            block.compile(dynamic=True)
        scaler = LossScaler(LossScaling(start=256.0))
    optimizer = adamw(model, 0.0)
    record = update(
        model,
        LOSSES["sigmoid"],
        optimizer,
        pairs(COUNT),
        keep=keep_indices(COUNT, (SIZE // 16) ** 2, 0.5, seed=0, step=3, device="cpu"),
        clip_norm=1e9,
        precision=precision,
        scaler=scaler,
        micro_batch=micro_batch,
        seed=3,
        layers=LayerGradients(model, optimizer),
    )
    assert record["skipped"] is None
    assert {p.requires_grad for p in model.parameters()} == {False, True}
    return gradients(model), record


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest error of any gradient, as a share of the whole gradient's norm."""
    assert found.keys() == expected.keys()
    norm = torch.nn.utils.get_total_norm(list(expected.values()))
    return max(float((found[name] - expected[name]).norm() / norm) for name in expected)


@pytest.mark.parametrize(
    ("compiled", "lora"),
    [(False, False), (False, True), pytest.param(True, False, marks=pytest.mark.full)],
    ids=["eager", "adapters", "compiled"],
)
def test_all_at_once_gives_the_gradients_of_a_plain_update(compiled: bool, lora: bool) -> None:
    """Perhaps compiled, computed again, masked, frozen in part, scaled, in float16: what caching
    adds is within what float16 itself differs by from float32. (Compiling takes a minute.)"""
    torch._dynamo.reset()
    frames = torch._dynamo.utils.counters["frames"]
    frames.clear()
    exact, exact_record = gradients_of(None, "fp32", lora=lora)
    whole, _ = gradients_of(None, "fp16", compiled=compiled, lora=lora)
    assert (frames["ok"] > 0) == compiled
    cached, record = gradients_of(MICRO, "fp16", compiled=compiled, lora=lora)
    torch._dynamo.reset()
    own = error(whole, exact)
    assert 1e-5 < own < 0.02
    assert error(cached, whole) < 2 * own
    assert error(cached, exact) < 2 * own
    assert {"logit_scale", "logit_bias"} <= cached.keys()
    assert any("lora_A" in name for name in cached) == lora
    assert not any("patch_embed" in name or "token_embedding" in name for name in cached)
    assert record["loss"] == pytest.approx(exact_record["loss"], rel=1e-2)
    assert record["grad_norms"] == pytest.approx(exact_record["grad_norms"], rel=0.05)


@pytest.mark.parametrize("lora", [False, True])
def test_in_float32_the_same_to_rounding(lora: bool) -> None:
    exact, _ = gradients_of(None, "fp32", lora=lora)
    cached, _ = gradients_of(MICRO, "fp32", compiled=False, lora=lora)
    assert error(cached, exact) < 1e-5
