"""What a multi-tensor step works on: tensors that are updated alike, gathered into buckets.

Parameters may be split over ranks (DTensor). Each rank then updates the part that it holds, and
sums over whole tensors are the ranks' sums added up.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Sharding = tuple[DeviceMesh, tuple[int, ...]]
"""The mesh, and those of its dimensions that split the tensor."""


class Entry(NamedTuple):
    """A tensor to update."""

    name: str
    size: int  # elements of the whole tensor, so that all ranks form the same buckets
    tensors: list[Tensor]  # parameter, gradient, exp_avg, exp_avg_sq: what this rank holds


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Tensors of one group, device, dtype, step count and sharding."""

    entries: list[Entry]
    group: dict[str, Any]
    step: int
    """From 1."""
    sharding: Sharding | None
    """None: every rank holds all of them."""

    @property
    def device(self) -> torch.device:
        return self.entries[0].tensors[0].device

    def columns(self) -> list[list[Tensor]]:
        """Parameters, gradients, first and second moments."""
        return [list(column) for column in zip(*(e.tensors for e in self.entries), strict=True)]

    def parts(self, limit: int) -> Iterator["Bucket"]:
        """Each tensor of more than `limit` elements by itself, the others up to that together."""
        run: list[Entry] = []
        size = 0
        for entry in self.entries:
            if entry.size > limit:
                yield replace(self, entries=[entry])
                continue
            if size + entry.size > limit:
                yield replace(self, entries=run)
                run, size = [], 0
            run.append(entry)
            size += entry.size
        if run:
            yield replace(self, entries=run)


def buckets(optimizer: torch.optim.Optimizer) -> Iterator[Bucket]:
    """Of every parameter that has a gradient, its step counted, its moments made where it has none.

    Raises:
        ValueError: a gradient is sparse, or placed otherwise than its parameter.
    """
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
        alike: defaultdict[tuple[Any, ...], list[Entry]] = defaultdict(list)
        for name, p in zip(names, group["params"], strict=True):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise ValueError(f"{name}: expected a dense gradient, found a sparse one")
            sharding = _sharding(name, p)
            state = optimizer.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)  # on CPU: read for free
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
            state["step"] += 1
            tensors = _local(p.detach(), p.grad, state["exp_avg"], state["exp_avg_sq"])
            key = (p.device, p.dtype, sharding, int(state["step"].item()))
            alike[key].append(Entry(name, p.numel(), tensors))
        for (_, _, sharding, step), entries in alike.items():
            yield Bucket(entries=entries, group=group, step=step, sharding=sharding)


def all_reduce(sums: Tensor, sharding: Sharding) -> Tensor:
    """The ranks' sums added up, in place."""
    mesh, dims = sharding
    for dim in dims:
        dist.all_reduce(sums, group=mesh.get_group(dim))
    return sums


def whole_sums(parts: list[Tensor], sharding: Sharding) -> list[Tensor]:
    """Sums that each rank has over its own, over the whole: one collective for all.

    Args:
        parts: of equal shapes but for their last dimension.
    """
    total = all_reduce(torch.cat(parts, dim=-1), sharding)
    return list(torch.split(total, [part.shape[-1] for part in parts], dim=-1))


def _sharding(name: str, p: Tensor) -> Sharding | None:
    if not isinstance(p, DTensor):
        return None
    if not isinstance(p.grad, DTensor) or p.grad.placements != p.placements:
        raise ValueError(f"{name}: its gradient must be placed as {p.placements}, found {p.grad!r}")
    split = (i for i, place in enumerate(p.placements) if not place.is_replicate())
    dims = tuple(i for i in split if p.device_mesh.size(i) > 1)
    return (p.device_mesh, dims) if dims else None


def _local(*tensors: Tensor) -> list[Tensor]:
    """What this rank holds, flat where memory order is the index order in all of them."""
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [t.view(-1) for t in parts] if all(t.is_contiguous() for t in parts) else parts
