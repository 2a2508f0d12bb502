"""Parameters split over two real processes (DTensor): each optimizer's steps are those of one."""

import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pennyclip.optim.lamb import Lamb
from pennyclip.optim.stable_adamw import StableAdamW

SHAPES = [(6, 4), (3, 5), (1, 8), (2, 2)]  # one rank holds nothing of the third
STEPS = 4


def make(kind: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "stable-adamw":
        return StableAdamW(params, 0.01, (0.9, 0.98), 1e-6, 0.05)
    return Lamb(params, 0.01, variant=kind)  # type: ignore[arg-type]


KINDS = ["paper", "nvlamb", "eva", "stable-adamw"]


def tensors() -> tuple[list[Tensor], list[list[Tensor]]]:
    """The parameters, and their gradients, which jump at the last step."""
    generator = torch.Generator().manual_seed(1)
    start, *grads = (
        [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
        for _ in range(1 + STEPS)
    )
    grads[-1][0] *= 100
    return start, grads


def train(optimizer: torch.optim.Optimizer, grads: list[list[Tensor]]) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in params]


def place(values: list[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """The last one stays whole on both ranks."""
    return [distribute_tensor(x, mesh, [Shard(0)]) for x in values[:-1]] + values[-1:]


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    start, grads = tensors()
    calls: list[tuple[int, ...]] = []
    original = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tuple(tensor.shape))
        return original(tensor, *args, **kwargs)

    for kind in KINDS:
        params = [nn.Parameter(x) for x in place([x.clone() for x in start], mesh)]
        optimizer = make(kind, params)
        placed = [place(step, mesh) for step in grads]
        calls.clear()
        dist.all_reduce = counted
        finals = train(optimizer, placed)
        dist.all_reduce = original
        # One a step, of all tensors at once; nvlamb's norm of all gradients besides.
        vector = (3,) if kind == "stable-adamw" else (2, 3)
        assert [s for s in calls if s != ()] == [vector] * STEPS, calls
        assert len(calls) == STEPS * (2 if kind == "nvlamb" else 1)
        result: dict[str, Any] = {"finals": [p.full_tensor() for p in finals[:-1]] + finals[-1:]}
        if isinstance(optimizer, Lamb):
            result["ratios"] = optimizer.trust_ratios()
        if rank == 0:
            torch.save(result, os.path.join(folder, f"{kind}.pt"))
    params[0].grad = distribute_tensor(grads[0][0], mesh, [Replicate()])
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"0\.0: its gradient must be placed as"):
            make(kind, params).step()
    dist.barrier()
    dist.destroy_process_group()


def test_sharded_over_two_processes_equals_one() -> None:
    start, grads = tensors()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(folder,), nprocs=2)
        for kind in KINDS:
            optimizer = make(kind, [nn.Parameter(x.clone()) for x in start])
            finals = train(optimizer, grads)
            found = torch.load(os.path.join(folder, f"{kind}.pt"), weights_only=True)
            for one, split in zip(finals, found["finals"], strict=True):
                assert torch.allclose(one, split, rtol=0, atol=1e-10)
            if isinstance(optimizer, Lamb):
                assert found["ratios"] == pytest.approx(optimizer.trust_ratios(), rel=1e-10)
