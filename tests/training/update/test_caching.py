"""Gradient caching gives the gradients of one whole pass, whatever is drawn inside the towers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Config, ImageTower, LossScaling, Model, Precision, Stage
from pennyclip.data.loader import Batch
from pennyclip.loss import LOSSES, Features
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import freeze
from pennyclip.model.masking import keep_indices
from pennyclip.training.loop import train
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.training.update.caching import check_cacheable, micro_seed, rows_of
from pennyclip.training.update.precision import autocast
from pennyclip.training.update.scaling import LossScaler
from pennyclip.training.update.update import embed_image, embed_text, update
from small_runs import small_run
from update_batches import SIZE, adamw, gradients, pairs, tiny_clip

SEED = 7


def masks(count: int) -> Tensor:
    """Half of the 16 patches of each image."""
    return keep_indices(count, (SIZE // 16) ** 2, 0.5, seed=0, step=3, device="cpu")


def cached(
    model: CLIP,
    batch: Batch,
    micro_batch: int | None,
    *,
    loss: str = "infonce",
    keep: Tensor | None = None,
    precision: Precision = "fp32",
    loss_scale: float | None = None,
) -> dict[str, Tensor]:
    """The gradients that an update works with, the weights left as they are."""
    record = update(
        model,
        LOSSES[loss],
        adamw(model, 0.0),
        batch,
        keep=keep,
        clip_norm=float("inf"),
        precision=precision,
        scaler=LossScaler(LossScaling(start=loss_scale)) if loss_scale else None,
        micro_batch=micro_batch,
        seed=SEED,
    )
    assert record["skipped"] is None
    return gradients(model)


def in_one_pass(
    model: CLIP,
    batch: Batch,
    micro_batch: int,
    *,
    loss: str = "infonce",
    keep: Tensor | None = None,
    precision: Precision = "fp32",
    loss_scale: float = 1.0,
) -> dict[str, Tensor]:
    """The same micro-forwards, their graphs all kept, and one backward pass through them."""
    images, texts = [], []
    for number, start in enumerate(range(0, len(batch.rows), micro_batch)):
        at = slice(start, start + micro_batch)
        part, kept = rows_of(batch, at), None if keep is None else keep[at]
        with autocast(precision, torch.device("cpu")):
            torch.manual_seed(micro_seed(SEED, number, 0))
            images.append(embed_image(model, part, kept))
            torch.manual_seed(micro_seed(SEED, number, 1))
            texts.append(embed_text(model, part))
    image, text = (F.normalize(torch.cat(x).float(), dim=-1) for x in (images, texts))
    scale = model.logit_scale.exp()
    value, _ = LOSSES[loss].compute(
        Features(image, text, image, text, 0, scale, model.logit_bias, batch.groups)
    )
    model.zero_grad()
    (value * loss_scale).backward()
    return {name: gradient / loss_scale for name, gradient in gradients(model).items()}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of any gradient, relative to that gradient's norm."""
    assert found.keys() == expected.keys()
    norms = {name: value.norm().clamp(min=1e-8) for name, value in expected.items()}
    return max(float((found[name] - expected[name]).norm() / norms[name]) for name in norms)


@pytest.mark.parametrize("loss", ["infonce", "sigmoid"])
@pytest.mark.parametrize(("size", "micro_batch"), [(8, 4), (8, 3), (5, 1)])
def test_every_gradient_equals_that_of_one_pass(loss: str, size: int, micro_batch: int) -> None:
    """With masks and dropout on; temperature and bias included."""
    model = tiny_clip(dropout=0.2, bias=loss == "sigmoid")
    batch, keep = pairs(size), masks(size)
    found = cached(model, batch, micro_batch, loss=loss, keep=keep)
    expected = in_one_pass(model, batch, micro_batch, loss=loss, keep=keep)
    assert len(found) == len(list(model.parameters()))
    assert error(found, expected) < 1e-5
    assert expected["logit_scale"] != 0
    # Neither masks nor dropout are idle here: without either, gradients are others.
    assert error(in_one_pass(model, batch, micro_batch, loss=loss), expected) > 0.05
    model.eval()
    model.visual.train()
    assert error(in_one_pass(model, batch, micro_batch, loss=loss, keep=keep), expected) > 0.05


def test_without_dropout_a_micro_batch_changes_nothing() -> None:
    model, batch, keep = tiny_clip(), pairs(8), masks(8)
    whole = cached(model, batch, None, keep=keep)
    for micro_batch in (1, 3, 4):
        assert error(cached(model, batch, micro_batch, keep=keep), whole) < 1e-5
    as_one = cached(model, batch, 8, keep=keep)
    assert all(torch.equal(value, as_one[name]) for name, value in whole.items())


def test_in_fp16_with_scaling_the_error_is_fp16s_own() -> None:
    model, batch, keep = tiny_clip(dropout=0.2), pairs(5), masks(5)
    half: dict[str, Any] = {"keep": keep, "precision": "fp16", "loss_scale": 1024.0}
    exact = in_one_pass(model, batch, 2, keep=keep)
    expected = in_one_pass(model, batch, 2, **half)
    found = cached(model, batch, 2, **half)
    own = error(expected, exact)
    assert 1e-4 < own < 0.1
    assert error(found, expected) < own


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_partly_frozen_towers_with_masks_and_scaling(precision: Precision) -> None:
    model, batch, keep = tiny_clip(dropout=0.2), pairs(7), masks(7)
    freeze(model, 1, 1)
    options: dict[str, Any] = {"keep": keep, "precision": precision, "loss_scale": 512.0}
    found, expected = cached(model, batch, 3, **options), in_one_pass(model, batch, 3, **options)
    own = error(expected, in_one_pass(model, batch, 3, keep=keep)) if precision == "fp16" else 1e-5
    assert error(found, expected) < own
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen
    assert not found.keys() & set(frozen)


def most_kept(model: CLIP, batch: Batch, micro_batch: int | None) -> int:
    """Most bytes of activations that are kept for the backward pass at any time of an update."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    now = most = 0

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal now, most
            self.tensor = tensor
            own = tensor.untyped_storage().data_ptr() not in weights
            self.bytes = tensor.nbytes * own
            now += self.bytes
            most = max(most, now)

        def __del__(self) -> None:
            nonlocal now
            now -= self.bytes

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        cached(model, batch, micro_batch)
    return most


def test_one_tower_at_a_time_keeps_its_activations() -> None:
    """So a micro-batch keeps less than the same pairs as a batch of their own."""
    model = tiny_clip()
    alone, whole = most_kept(model, pairs(8), None), most_kept(model, pairs(64), None)
    assert whole > 7 * alone
    embeddings = 64 * 24 * 4
    assert most_kept(model, pairs(64), 8) < 0.9 * alone + 16 * embeddings


def test_stored_features_pass_no_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    model, stored = tiny_clip(), torch.randn(6, 192, generator=torch.Generator().manual_seed(0))
    model.visual.trunk.requires_grad_(False)
    monkeypatch.setattr(model.visual, "features", lambda *_: pytest.fail("the trunk was run"))
    batch = pairs(6, image_features=stored, images=None)
    found = cached(model, batch, 4)
    assert error(found, in_one_pass(model, batch, 4)) < 1e-5
    assert "visual.head.proj.weight" in found
    assert not any(name.startswith("visual.trunk") for name in found)


def test_a_tower_in_which_nothing_learns_is_passed_over() -> None:
    model = tiny_clip(head="none")
    model.visual.requires_grad_(False)
    batch = pairs(5, image_features=torch.randn(5, 192), images=None)
    found = cached(model, batch, 2)
    assert error(found, in_one_pass(model, batch, 2)) < 1e-5
    assert {name.split(".")[0] for name in found} == {"text", "logit_scale"}


def test_seeds_of_micro_batches_are_all_different() -> None:
    seeds = {
        micro_seed(seed, number, tower)
        for seed in range(0, 10**6, 10**4)
        for number in range(100)
        for tower in (0, 1)
    }
    assert len(seeds) == 20_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def config(batch_size: int, micro_batch: int | None) -> Config:
    model = Model(image=ImageTower(name="unused"))
    return Config(model=model, stages=(), batch_size=batch_size, micro_batch=micro_batch)


def test_batch_norm_in_training_mode_is_refused() -> None:
    model = tiny_clip(image="mobilenetv3_small_050")
    with pytest.raises(RequestError, match=r"34 BatchNorm layers \(visual\.trunk\.bn1, \.\.\.\)"):
        check_cacheable(model, config(8, 4))
    check_cacheable(model, config(8, None))
    check_cacheable(model, config(8, 8))
    check_cacheable(model.eval(), config(8, 4))


@pytest.mark.parametrize("micro_batch", [-1, 0, 9])
def test_a_micro_batch_is_a_part_of_the_batch(micro_batch: int) -> None:
    with pytest.raises(RequestError, match=r"batch_size = 8; set it between 1 and that"):
        check_cacheable(tiny_clip(), config(8, micro_batch))


def test_a_run_with_micro_batches_is_the_same_run(small_dataset: Path, tmp_path: Path) -> None:
    plain = small_run(small_dataset, stages=(Stage(samples=24, mask_ratio=0.5),))
    lines = []
    for name, micro_batch in (("plain", None), ("cached", 3)):
        train(replace(plain, micro_batch=micro_batch), tmp_path / name, quiet=True)
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        lines.append([r for r in records if r["kind"] == "train"])
    for one, other in zip(*lines, strict=True):
        for key in ("loss", "grad_norm", "logit_scale"):
            assert other[key] == pytest.approx(one[key], rel=1e-5)
        assert other["candidates"] == 8
    assert len(lines[0]) == 3
