"""What each of two processes does in `test_parallel.py`, in one start of them."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pennyclip.base.errors import RequestError, RunError
from pennyclip.config.keys import LossScaling
from pennyclip.data.loader import Batch
from pennyclip.loss import LOSSES, Features, Loss, tiles
from pennyclip.model.clip import CLIP
from pennyclip.model.masking import keep_indices
from pennyclip.training.telemetry.gradients import LayerGradients
from pennyclip.training.update.caching import rows_of
from pennyclip.training.update.parallel import ALONE, Ranks
from pennyclip.training.update.scaling import LossScaler
from pennyclip.training.update.update import update
from update_batches import SIZE, adamw, gradients, pairs, tiny_clip, weights

COUNT, PART = 2, 8
PAIRS = COUNT * PART
FIRST_ROW = 100
USUAL: dict[str, Any] = {"clip_norm": 1.0, "precision": "fp32", "seed": 5}
GROUPS = torch.arange(PAIRS)
GROUPS[[2, 9, 11]] = 1  # rows 1 and 2 of rank 0 with two of rank 1
GROUPS[15] = 0

built = cache(tiny_clip)


def fresh(**options: Any) -> CLIP:
    """A model as it is at first; building it takes longer than an update."""
    return deepcopy(built(**options))


def own_pairs(ranks: Ranks | None, groups: Tensor | None = None, **changed: Any) -> Batch:
    """A rank's part of the batch, or the whole of it."""
    groups = torch.arange(PAIRS) if groups is None else groups
    whole = pairs(PAIRS, rows=torch.arange(PAIRS) + FIRST_ROW, groups=groups, **changed)
    return rows_of(whole, ranks.part(PART)) if ranks else whole


@dataclass(frozen=True)
class Case:
    """An update that several processes have to make as one does."""

    loss: str = "infonce"
    micro_batch: int | None = None
    masked: bool = False
    grouped: bool = False
    dropout: float = 0.0
    tile: int | None = None

    def run(self, ranks: Ranks | None) -> dict[str, Any]:
        model = fresh(dropout=self.dropout, bias=self.loss == "sigmoid")
        optimizer = adamw(model, 0.0)
        keep = keep_indices(PAIRS, (SIZE // 16) ** 2, 0.5, seed=0, step=3, device="cpu")
        # What dropout draws is that of a single process whose micro-batches are the ranks' parts.
        alone = PART if self.dropout else None
        with pytest.MonkeyPatch.context() as patch:
            if self.tile:
                patch.setattr(tiles, "TILE", self.tile)
            record = update(
                model,
                LOSSES[self.loss],
                optimizer,
                own_pairs(ranks, GROUPS if self.grouped else None),
                keep=keep if self.masked else None,
                micro_batch=self.micro_batch or (None if ranks else alone),
                layers=LayerGradients(model, optimizer),
                ranks=ranks,
                **USUAL | {"clip_norm": math.inf},
            )
        features = record.pop("features")
        assert record.pop("skipped") is None
        assert (features.offset, features.image) == (0, features.all_image)
        kept = {name: getattr(features, name) for name in ("image", "text", "scale", "groups")}
        return {"gradients": gradients(model), "record": record, "features": kept}


CASES = {
    "whole parts": Case(),
    "micro-batches of a quarter": Case(micro_batch=PART // 4),
    "micro-batches with a remainder": Case(micro_batch=3),
    "masked": Case(masked=True),
    "masked, in micro-batches": Case(masked=True, micro_batch=2),
    "dropout": Case(dropout=0.2, masked=True),
    "dropout, in micro-batches": Case(dropout=0.2, micro_batch=2, masked=True),
    "all at once": Case("multi_positive", 2, masked=True, grouped=True, dropout=0.2, tile=3),
    **{f"groups, {loss}": Case(loss, grouped=True) for loss in LOSSES},
    **{f"groups, {loss}, in tiles": Case(loss, 2, grouped=True, tile=3) for loss in LOSSES},
}


def white_is_too_much(_: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    white = inputs[0].flatten(1).min(1).values > 0.9
    return output.masked_fill(white[:, None, None], math.inf)


def whitened(batch: Batch, row: int) -> Batch:
    assert batch.images is not None
    images = batch.images.clone()
    images[row] = 255
    return replace(batch, images=images)


SCALE = 64.0
STEPS = ["made", 1, "made", "made", 0, 1, "white on 0", "made", "made"]
"""What happens at each: an overflow in the gradients of one rank, or in one of its images."""


def overflowing(ranks: Ranks) -> dict[str, Any]:
    """Updates in fp16, from a temperature beyond its bound."""
    model, happening = fresh(dropout=0.1), None
    model.start_logits(200.0, 0.0)
    optimizer, scaler = adamw(model), LossScaler(LossScaling(start=SCALE, interval=2))
    model.visual.trunk.patch_embed.register_forward_hook(white_is_too_much)
    model.visual.head.proj.weight.register_hook(
        lambda gradient: gradient * math.inf if happening == ranks.rank else gradient
    )
    records, temperatures = [], []
    for step, happening in enumerate(STEPS):
        batch = own_pairs(ranks)
        if happening == "white on 0" and ranks.rank == 0:
            batch = whitened(batch, 3)
        options = USUAL | {"precision": "fp16", "seed": step, "micro_batch": 4}
        records.append(
            update(
                model, LOSSES["infonce"], optimizer, batch, scaler=scaler, ranks=ranks, **options
            )
        )
        temperatures.append(model.logit_scale.item())
    return {
        "records": records,
        "temperatures": temperatures,
        "scaler": scaler.state(),
        "weights": weights(model),
    }


def not_finite(ranks: Ranks) -> dict[str, Any]:
    """What is named, by what is wrong."""
    model, loss, named = fresh(), LOSSES["infonce"], {}
    optimizer = adamw(model)

    def skipped(batch: Batch, loss: Loss = loss) -> dict[str, Any]:
        return update(model, loss, optimizer, batch, ranks=ranks, **USUAL)["skipped"]

    with pytest.MonkeyPatch.context() as patch:
        project = model.text.project
        if ranks.rank == 1:
            patch.setattr(model.text, "project", lambda features: math.inf * project(features))
        named["text"] = skipped(own_pairs(ranks))
    hook = model.visual.trunk.patch_embed.register_forward_hook(white_is_too_much)
    one = own_pairs(ranks)
    named["white"] = skipped(whitened(one, 5) if ranks.rank == 1 else one)
    named["white on both"] = skipped(whitened(one, ranks.rank))
    hook.remove()

    def wild(features: Features) -> tuple[Tensor, dict[str, float | Tensor]]:
        value, metrics = loss.compute(features)
        return value * (math.inf if ranks.rank == 1 else 1), metrics

    named["loss"] = skipped(one, replace(loss, compute=wild))
    name = "text.transformer.resblocks.1.ln_2.bias"
    if ranks.rank == 1:
        model.get_parameter(name).register_hook(lambda gradient: gradient * math.nan)
    named["gradient"] = skipped(one)
    return named | {"untouched": not optimizer.state}


class Shortage:
    """Memory that runs out on one rank: at some calls, or for batches of more than `most`."""

    def __init__(self, here: bool, calls: set[int], most: int = PART) -> None:
        self.here, self.calls, self.most, self.called = here, calls, most, 0

    def __call__(self, *inputs: Any) -> None:
        self.called += 1
        large = bool(inputs) and torch.is_tensor(inputs[-1]) and len(inputs[-1]) > self.most
        if self.here and (self.called in self.calls or large):
            raise torch.OutOfMemoryError("CUDA out of memory.")


def running_out(ranks: Ranks) -> dict[str, Any]:
    """One rank runs out of memory somewhere in an update: what comes of it on each."""
    here, loss, found = ranks.rank == 1, LOSSES["infonce"], {}

    def again(model: CLIP, loss: Loss = loss, micro_batch: int | None = None) -> dict[str, Any]:
        optimizer, before = adamw(model, 0.0), weights(model)
        options = USUAL | {"clip_norm": math.inf, "micro_batch": micro_batch}
        record = update(model, loss, optimizer, own_pairs(ranks), ranks=ranks, **options)
        assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
        return {"record": record, "gradients": gradients(model)}

    for name, shortage, micro_batch in (
        ("the first pass", Shortage(here, set(), most=2), None),
        ("the second pass", Shortage(here, {4}), 4),  # 2 pieces without a graph, 1 with, and now
        ("every pass but the last", Shortage(here, {1, 2, 3}), None),
    ):
        model = fresh()
        model.visual.head.register_forward_hook(shortage)
        found[name] = again(model, micro_batch=micro_batch)

    model, shortage = fresh(), Shortage(here, {1})
    found["the loss"] = again(
        model, replace(loss, compute=lambda f: (shortage(), loss.compute(f))[1])
    )
    model, shortage = fresh(), Shortage(here, {1})
    model.visual.trunk.blocks[0].mlp.fc1.weight.register_hook(lambda _: shortage())
    found["the backward pass"] = again(model)
    return found


def failing(ranks: Ranks) -> dict[str, str]:
    """What each rank says where no update can be made."""
    here, said = ranks.rank == 1, {}

    def say(name: str, model: CLIP, change: Callable[[torch.optim.Optimizer], object]) -> None:
        optimizer, before = adamw(model), weights(model)
        change(optimizer)
        with pytest.raises((RunError, RequestError, ZeroDivisionError)) as caught:
            update(model, LOSSES["infonce"], optimizer, own_pairs(ranks), ranks=ranks, **USUAL)
        unmoved = all(torch.equal(value, before[key]) for key, value in weights(model).items())
        assert unmoved or name == "the step"
        said[name] = f"{type(caught.value).__name__}: {caught.value}"

    def cut(model: CLIP) -> None:
        features = model.text.features
        model.text.features = lambda *inputs: features(*inputs).detach()  # type: ignore

    def divide(*_: Any) -> None:
        if here:
            raise ZeroDivisionError("by zero")

    model = fresh()
    say("cut on both", model, lambda _: cut(model))
    model = fresh()
    say("cut on one", model, lambda _: cut(model) if here else None)
    model = fresh()
    model.text.register_forward_hook(divide)
    model.visual.head.register_forward_hook(divide)
    say("another error", model, lambda _: None)
    model = fresh()
    model.visual.head.register_forward_hook(Shortage(here, set(), most=0))
    say("not even one", model, lambda _: None)
    model = fresh()
    say("the step", model, lambda o: o.register_step_pre_hook(Shortage(here, {1})))
    model = fresh(image="mobilenetv3_small_050")
    say("batch norm", model, lambda _: None)
    return said


def rounding(ranks: Ranks) -> dict[str, Tensor]:
    """Weights after two updates that round them stochastically."""
    model = fresh(dropout=0.1)
    optimizer = adamw(model)
    for step in range(2):
        options = USUAL | {"precision": "pure-bf16", "seed": step}
        update(
            model, LOSSES["infonce"], optimizer, own_pairs(ranks), ranks=ranks,
            stochastic_rounding=True, **options,
        )  # fmt: skip
    return weights(model)


def summing(ranks: Ranks) -> list[Tensor]:
    """Sums of tensors on both sides of `ALONE`, one of them not contiguous."""
    side = int((ALONE / 4) ** 0.5) + 1
    shapes: tuple[tuple[int, ...], ...] = ((), (3,), (side, side), (2, 5), (side, side + 1))
    generator = torch.Generator().manual_seed(ranks.rank)
    own = [torch.randn(shape, generator=generator) for shape in shapes]
    own[4] = own[4].T
    sums = [tensor.clone() for tensor in own]
    ranks.sum_(sums)
    assert sums[4].stride() == own[4].stride()
    return [*own, *sums]


SCENARIOS: list[Callable[[Ranks], Any]] = [
    overflowing, not_finite, running_out, failing, rounding, summing,
]  # fmt: skip


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", COUNT)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=COUNT, timeout=timedelta(seconds=60)
    )
    ranks = Ranks()
    found: dict[str, Any] = {name: case.run(ranks) for name, case in CASES.items()}
    found |= {scenario.__name__: scenario(ranks) for scenario in SCENARIOS}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
