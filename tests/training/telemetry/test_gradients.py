"""Gradient norms and means by layer, against the gradients themselves."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pennyclip.config.keys import Adapters, Lora, LossScaling, Optim
from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import freeze
from pennyclip.model.lora import adapt
from pennyclip.optim import OPTIMIZERS
from pennyclip.optim.groups import parameter_groups
from pennyclip.training.telemetry.gradients import LayerGradients, tensor_norms
from pennyclip.training.telemetry.metrics import layer_order
from pennyclip.training.update.scaling import LossScaler
from pennyclip.training.update.update import update
from update_batches import pairs, tiny_clip

BLOCK = "visual.trunk.blocks.0"


def optimizer_of(model: CLIP, name: str = "adamw") -> torch.optim.Optimizer:
    optim = Optim(name=name, lr=0.0)
    return OPTIMIZERS[name](parameter_groups(model.named_parameters(), {}, optim), optim)


def updated(model: CLIP, name: str = "adamw", **options: Any) -> tuple[dict[str, Any], Any]:
    optimizer = optimizer_of(model, name)
    layers = LayerGradients(model, optimizer)
    usual: dict[str, Any] = {"clip_norm": math.inf, "precision": "fp32"}
    record = update(model, LOSSES["infonce"], optimizer, pairs(6), layers=layers, **usual | options)
    return record, layers


def by_hand(model: nn.Module, prefix: str) -> Tensor:
    """All of the gradient below a module, in one row, in float64."""
    found = [
        p.grad.double().flatten()
        for name, p in model.named_parameters()
        if p.grad is not None and (f"{name}.").startswith(f"{prefix}.")
    ]
    return torch.cat(found)


def check(model: CLIP, record: dict[str, Any], layers: LayerGradients) -> None:
    """Against the gradients of what `layers()` of either tower says, in float64."""
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    parts = [[f"visual.{name}" for name in layer] for layer in model.visual.layers()]
    parts.append([name for name in gradients if name.startswith("visual.head")])
    parts += [[f"text.{name}" for name in layer] for layer in model.text.layers()]
    parts += [["text.text_projection"], ["logit_scale"]]
    expected = []
    for names in parts:
        found = [gradients[name].square().sum() for name in names if name in gradients]
        if found:
            expected.append(math.sqrt(sum(found)))
    assert list(record["grad_norms"]) == layers.names
    assert list(record["grad_norms"].values()) == pytest.approx(expected, rel=1e-5)
    total = math.sqrt(sum(norm**2 for norm in expected))
    assert total == pytest.approx(record["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "lamb", "stable-adamw"])
@pytest.mark.parametrize("options", [{}, {"micro_batch": 4}], ids=["whole", "cached"])
def test_norms_are_those_of_the_layers_gradients(name: str, options: dict[str, Any]) -> None:
    model = tiny_clip()
    record, layers = updated(model, name, **options)
    assert layers.names == [
        "visual.trunk.patch_embed", BLOCK, "visual.trunk.blocks.1", "visual.head",
        "text.token_embedding", "text.transformer.resblocks.0", "text.transformer.resblocks.1",
        "text.text_projection", "logit_scale",
    ]  # fmt: skip
    check(model, record, layers)


def test_norms_are_of_the_true_gradient_whatever_the_loss_scale() -> None:
    plain, _ = updated(tiny_clip())
    scaled, _ = updated(tiny_clip(), scaler=LossScaler(LossScaling(start=1024.0)))
    assert scaled["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-6)


@pytest.mark.parametrize("clip_norm", [math.inf, 0.01])
def test_means_are_of_the_gradient_before_clipping(clip_norm: float) -> None:
    model = tiny_clip()
    updated(model)
    expected = float(by_hand(model, BLOCK).mean())
    record, layers = updated(model, clip_norm=clip_norm)
    found = layers.metrics(record, clip_norm)
    assert list(found["grad_means"]) == list(found["grad_norms"]) == layers.names
    assert found["grad_means"][BLOCK] == pytest.approx(expected, rel=1e-2, abs=1e-9)
    assert expected != 0
    assert found["grad_norms"][BLOCK] == pytest.approx(record["grad_norms"][BLOCK], rel=1e-3)
    skipped = layers.metrics(record | {"skipped": {"tensor": "the loss"}}, clip_norm)
    assert skipped["grad_means"] == {}


def test_frozen_layers_and_adapters() -> None:
    model = tiny_clip()
    freeze(model, 1, "none")
    record, layers = updated(model)
    assert layers.names == [
        "visual.trunk.blocks.1", "visual.head", "text.text_projection", "logit_scale"
    ]  # fmt: skip
    check(model, record, layers)
    adapted = tiny_clip()
    adapt(adapted, Adapters(image=Lora(rank=2), text=Lora(rank=2)), 0)
    freeze(adapted, "all", "all")
    record, layers = updated(adapted)
    assert layers.names[0] == BLOCK
    check(adapted, record, layers)


class Waits(TorchDispatchMode):
    """Counts reads of single numbers. (Reading a whole tensor at once doesn't show here.)"""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_norms_by_layer_make_an_update_wait_no_more_often() -> None:
    counts = []
    for watched in (True, False):
        model = tiny_clip()
        optimizer = optimizer_of(model, "lamb")
        layers = LayerGradients(model, optimizer) if watched else None
        with Waits() as waits:
            update(
                model,
                LOSSES["infonce"],
                optimizer,
                pairs(6),
                clip_norm=1.0,
                precision="fp32",
                layers=layers,
            )
        counts.append(waits.count)
    assert counts[0] == counts[1]


def test_layers_of_several_stages_are_put_in_order() -> None:
    late, all_of_them = ["c", "head"], ["a", "b", "c", "head", "x"]
    assert layer_order([late, all_of_them, ["x"]]) == all_of_them
    assert layer_order([]) == []


@contextmanager
def two_ranks(rank: int, folder: str) -> Iterator[Any]:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.barrier()
    dist.destroy_process_group()


def gradients_of(model: CLIP) -> list[Tensor]:
    updated(model)
    return [p.grad for p in model.parameters() if p.grad is not None]


def _sharded(rank: int, folder: str) -> None:
    with two_ranks(rank, folder) as mesh:
        model = tiny_clip()
        whole = gradients_of(model)
        # A parameter may be split unevenly, or stay whole on both ranks (the temperature).
        placed = [distribute_tensor(g, mesh, [Shard(0)]) if g.ndim else g for g in whole]
        norms = tensor_norms(placed)
        layers = LayerGradients(model, optimizer_of(model))
        if rank == 0:
            torch.save((tensor_norms(whole), norms, layers.norms(norms)), Path(folder) / "found")


def test_sharded_gradients_have_the_norms_of_the_whole(tmp_path: Path) -> None:
    mp.spawn(_sharded, args=(str(tmp_path),), nprocs=2)
    whole, sharded, by_layer = torch.load(tmp_path / "found")
    assert torch.allclose(sharded, whole, rtol=1e-5)
    assert len(by_layer) == 9
    assert not isinstance(sharded, torch.distributed.tensor.DTensor)
