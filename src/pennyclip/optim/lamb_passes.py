"""LAMB's two passes over memory, the first as multi-tensor operations or as one compiled kernel.

The first updates the moments and returns the squared norms of p and of the update u; the second,
given each tensor's factor, adds factor * u to p. What a ratio is stands in `lamb.py`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pennyclip.optim.rounding import NOISE, stochastic

# Chosen: a piece's tensors (2 MiB each in float32) stay in the cache over its operations. Pieces
# also keep the norm right: torch 2.14 adds up squares in long float32 runs on CPU and is off by
# 3e-3 over the 25 M weights of a token embedding, by 8e-6 in pieces of this size.
CPU_PIECE = 2**19
# Chosen: below this a compiled call costs more than the passes over memory that it saves.
COMPILED_MIN = 2**15
# Chosen: bounds the scratch (the update, 4 bytes an element) to 64 MiB or one larger tensor.
DEVICE_BATCH = 2**24

Shard = tuple[DeviceMesh, tuple[int, ...]]  # the mesh, and its dimensions that split the tensor


class Rule(NamedTuple):
    """A step as numbers: u = m / (sqrt(v) + eps) + weight_decay p, r = norm_scale u,
    p -= step_scale ratio u. The bias corrections are folded in, which saves passes over memory."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    norm_scale: float
    step_scale: float | Tensor


class Entry(NamedTuple):
    """A tensor to update."""

    name: str
    size: int  # elements of the whole tensor, so that all ranks form the same batches
    tensors: list[Tensor]  # parameter, gradient, exp_avg, exp_avg_sq: what this rank holds
    noise_seed: int | None  # of stochastic rounding


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tensors of one group, dtype, step count and device whose passes run together."""

    entries: list[Entry]
    rule: Rule
    adapt: bool
    shard: Shard | None
    compiled: bool


class First(NamedTuple):
    """What the first pass leaves for the second."""

    squares: Tensor  # [2, n]: of each tensor, the squared norm of p and of u
    params: list[Tensor]  # the tensors, or the pieces of the only one
    updates: list[Tensor]  # u of each


def pieces(tensor: Tensor) -> list[Tensor]:
    """A large flat CPU tensor in parts, see CPU_PIECE; anything else whole."""
    if tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.numel() > CPU_PIECE:
        return list(torch.split(tensor, CPU_PIECE))
    return [tensor]


def first_pass(batch: Batch, clip: Tensor | None) -> First:
    """Update the moments; gradients are multiplied by `clip`."""
    rule, wide = batch.rule, batch.entries[0].tensors[2].dtype
    runs = [batch.entries]
    if len(batch.entries) == 1:
        split = (pieces(tensor) for tensor in batch.entries[0].tensors)
        runs = [[Entry("", 0, list(piece), None)] for piece in zip(*split, strict=True)]
    moved: list[Tensor] = []
    updates: list[Tensor] = []
    p_norms: list[Tensor] = []
    u_norms: list[Tensor] = []
    for run in runs:
        columns = zip(*(e.tensors for e in run), strict=True)
        params, grads, exp_avgs, exp_avg_sqs = (list(column) for column in columns)
        wide_params = [p.to(wide) for p in params]
        grads = [g.to(wide) for g in grads]
        if clip is not None:
            grads = list(torch._foreach_mul(grads, clip))
        torch._foreach_lerp_(exp_avgs, grads, 1 - rule.beta1)
        torch._foreach_mul_(exp_avg_sqs, rule.beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - rule.beta2)
        u = list(torch._foreach_sqrt(exp_avg_sqs))
        torch._foreach_add_(u, rule.eps)
        torch._foreach_reciprocal_(u)  # not a division: that would need a second scratch
        torch._foreach_mul_(u, exp_avgs)
        torch._foreach_add_(u, wide_params, alpha=rule.weight_decay)
        p_norms += torch._foreach_norm(wide_params)
        u_norms += torch._foreach_norm(u)
        moved += params
        updates += u
    squares = torch.stack([torch.stack(p_norms), torch.stack(u_norms)]).square_()
    if len(batch.entries) == 1:
        squares = squares.sum(dim=1, keepdim=True)
    return First(squares, moved, updates)


def compiled_first_pass(batch: Batch, clip: Tensor | None, update: Tensor) -> First:
    """`first_pass` of a single tensor in one loop over memory; writes u to `update`."""
    rule = batch.rule
    numbers = (rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.weight_decay)
    # As tensors, so that new values do not compile anew; on CPU, where a kernel reads them free.
    scalars = [torch.tensor(x, dtype=torch.float64) for x in numbers]
    tensors = batch.entries[0].tensors
    squares = _compiled_kernel()(*tensors, update, scalars, clip)
    return First(squares, tensors[:1], [update])


@functools.cache
def _compiled_kernel() -> Callable[..., Tensor]:
    """One graph serves flat tensors of any length; `fullgraph` makes an exceeded recompile limit
    an error, not a quiet fallback."""
    return torch.compile(_kernel, dynamic=True, fullgraph=True)


def _kernel(
    p: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    update: Tensor,
    scalars: list[Tensor],
    clip: Tensor | None,
) -> Tensor:
    beta1, beta1_rest, beta2, beta2_rest, eps, weight_decay = scalars
    wide_p, g = p.to(m.dtype), grad.to(m.dtype)
    if clip is not None:
        g = g * clip
    new_m = m * beta1 + g * beta1_rest
    new_v = v * beta2 + g * g * beta2_rest
    # u is stored rather than computed again: without the store, torch 2.14 makes two loops of this,
    # one for the sums and one for the moments.
    u = new_m / (new_v.sqrt() + eps) + weight_decay * wide_p
    squares = torch.stack([(wide_p * wide_p).sum(), (u * u).sum()])[:, None]
    m.copy_(new_m)
    v.copy_(new_v)
    update.copy_(u)
    return squares


def second_pass(batch: Batch, first: First, factors: Tensor) -> None:
    """Add factor * u to each tensor; factors are [n]."""
    wide = first.updates[0].dtype
    steps = list(factors.unbind()) * (len(first.params) // len(batch.entries))
    if first.params[0].dtype == wide:
        torch._foreach_addcmul_(first.params, first.updates, steps)
        return
    noises = [_noise(entry) for entry in batch.entries]
    if len(noises) < len(first.params):
        noises = [None] * len(steps) if noises[0] is None else list(pieces(noises[0]))
    for p, update, step, noise in zip(first.params, first.updates, steps, noises, strict=True):
        _round_into(p, p.to(wide).addcmul_(update, step), noise)


def _noise(entry: Entry) -> Tensor | None:
    """Noise of `stochastic`, shaped as the parameter; None: round to nearest."""
    if entry.noise_seed is None:
        return None
    p = entry.tensors[0]
    generator = torch.Generator(p.device).manual_seed(entry.noise_seed)
    return torch.empty_like(p, dtype=torch.int32).random_(0, NOISE, generator=generator)


def _round_into(p: Tensor, x: Tensor, noise: Tensor | None) -> None:
    """Write x to p, rounded stochastically where there is noise, else to nearest."""
    p.copy_(x if noise is None else stochastic(x, noise))
