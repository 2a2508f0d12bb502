"""LAMB's two passes over memory, uncompiled (multi-tensor) and compiled (one kernel a pass).

The first updates the moments and returns the squared norms of p and of the update u; the second,
given each tensor's factor, adds factor * u to p. What a ratio is stands in `lamb.py`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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
    tensors: list[Tensor]  # parameter, gradient, exp_avg, exp_avg_sq: what this rank holds
    noise_seed: int | None  # of stochastic rounding

    @property
    def numel(self) -> int:
        return self.tensors[0].numel()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tensors of one group, dtype, step count and device whose passes run together."""

    entries: list[Entry]
    rule: Rule
    adapt: bool
    shard: Shard | None
    compiled: bool


# The second pass, given the factor of each tensor's update [n].
Apply = Callable[[Tensor], None]


def pieces(tensor: Tensor) -> list[Tensor]:
    """A large flat CPU tensor in parts, see CPU_PIECE; anything else whole."""
    if tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.numel() > CPU_PIECE:
        return list(torch.split(tensor, CPU_PIECE))
    return [tensor]


def first_pass(batch: Batch, clip: Tensor | None) -> tuple[Tensor, Apply]:
    """Update the moments; return the squared norms of p and u, [2, n], and the second pass."""
    rule, wide = batch.rule, batch.entries[0].tensors[2].dtype
    runs = [batch.entries]
    if len(batch.entries) == 1:
        split = (pieces(tensor) for tensor in batch.entries[0].tensors)
        runs = [[Entry("", list(piece), None)] for piece in zip(*split, strict=True)]
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

    def apply(factors: Tensor) -> None:
        steps = list(factors.unbind()) * (len(moved) // len(batch.entries))
        if moved[0].dtype == wide:
            torch._foreach_addcmul_(moved, updates, steps)
            return
        noises = [part for entry in batch.entries for part in _noise(entry)]
        for p, update, step, noise in zip(moved, updates, steps, noises, strict=True):
            _round_into(p, p.to(wide).addcmul_(update, step), noise)

    return squares, apply


def compiled_first_pass(batch: Batch, clip: Tensor | None) -> tuple[Tensor, Apply]:
    """`first_pass` of one tensor; the second pass computes u again instead of storing it."""
    first, second = _compiled_passes()
    p, grad, m, v = batch.entries[0].tensors
    # As tensors, so that new values do not compile anew; on CPU, where a kernel reads them free.
    rule = [torch.tensor(x, dtype=torch.float64) for x in batch.rule[:4]]

    def apply(factor: Tensor) -> None:
        noise = _noise(batch.entries[0], whole=True)[0]
        second(p, m, v, rule, factor, noise)

    return first(p, grad, m, v, rule, clip), apply


@functools.cache
def _compiled_passes() -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """One graph serves flat tensors of any length; `fullgraph` makes an exceeded recompile limit
    an error, not a quiet fallback."""
    first = torch.compile(_fused_first, dynamic=True, fullgraph=True)
    return first, torch.compile(_fused_second, dynamic=True, fullgraph=True)


def _fused_first(
    p: Tensor, grad: Tensor, m: Tensor, v: Tensor, rule: list[Tensor], clip: Tensor | None
) -> Tensor:
    g = grad.to(m.dtype) if clip is None else grad.to(m.dtype) * clip
    m.copy_(m * rule[0] + g * (1 - rule[0]))
    v.copy_(v * rule[1] + g * g * (1 - rule[1]))
    wide_p, u = _update(p, m, v, rule)
    return torch.stack([(wide_p * wide_p).sum(), (u * u).sum()])[:, None]


def _fused_second(
    p: Tensor, m: Tensor, v: Tensor, rule: list[Tensor], factor: Tensor, noise: Tensor | None
) -> None:
    wide_p, u = _update(p, m, v, rule)
    _round_into(p, wide_p + factor * u, noise)


def _update(p: Tensor, m: Tensor, v: Tensor, rule: list[Tensor]) -> tuple[Tensor, Tensor]:
    wide_p = p.to(m.dtype)
    return wide_p, m / (v.sqrt() + rule[2]) + rule[3] * wide_p


def _noise(entry: Entry, whole: bool = False) -> Sequence[Tensor | None]:
    """Uniform int32 in [0, 2^16), shaped and split as the parameter; None: round to nearest."""
    p = entry.tensors[0]
    if entry.noise_seed is None:
        return [None] * (1 if whole else len(pieces(p)))
    generator = torch.Generator(p.device).manual_seed(entry.noise_seed)
    noise = torch.empty_like(p, dtype=torch.int32).random_(0, 2**16, generator=generator)
    return [noise] if whole else pieces(noise)


def _round_into(p: Tensor, x: Tensor, noise: Tensor | None) -> None:
    """Write x to p. With noise, stochastically, float32 -> bfloat16 with the expectation of x: add
    noise below the 16 bits kept, cut them. A NaN stays: the sum could carry it over into a zero."""
    if noise is not None:
        bits = (x.view(torch.int32) + noise) & -(2**16)
        x = torch.where(x.isnan(), x, bits.view(torch.float32))
    p.copy_(x)
