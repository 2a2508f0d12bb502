"""A matrix of logits seen tile by tile, so that a loss takes memory for N x D and not for N x M.

A loss walks the tiles and computes its gradients along with its value, since going back through
the matrix later would mean keeping it; `with_gradients` then hands both to autograd.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 2816
"""Rows and columns of a tile. Chosen: of 1,024 to 4,096 the fastest at 8,192 rows on 2 busy CPU
cores. Smaller tiles mean more operations and so more waiting of threads for each other; from
2,897 on a float32 tile passes 32 MiB, above which glibc maps fresh memory for each one."""


def tiles(
    queries: Float[Tensor, "N D"],
    candidates: Float[Tensor, "M D"],
    query_groups: Int64[Tensor, " N"],
    candidate_groups: Int64[Tensor, " M"],
) -> Iterator[tuple[slice, slice, Float[Tensor, "n m"], Bool[Tensor, "n m"]]]:
    """Yield rows, columns, the products of their vectors, and which of these are of one group.

    The two tensors are the caller's to change.
    """
    for i in range(0, len(queries), TILE):
        for j in range(0, len(candidates), TILE):
            r, c = slice(i, i + TILE), slice(j, j + TILE)
            same = query_groups[r, None] == candidate_groups[None, c]
            yield r, c, queries[r] @ candidates[c].T, same


def with_gradients(
    value: Float[Tensor, ""], inputs: list[Tensor], gradients: list[Tensor]
) -> Float[Tensor, ""]:
    """`value` as a function of `inputs`, whose gradients are known already."""
    return _Known.apply(value, gradients, *inputs)


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(upstream * g if needed else None for g, needed in gradients))
