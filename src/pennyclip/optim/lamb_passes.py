"""LAMB's two passes over memory, the first as multi-tensor operations or as one compiled kernel.

The first updates the moments and returns the squared norms of p and of the update u; the second,
given each tensor's factor, adds factor * u to p. What a ratio is stands in `lamb.py`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pennyclip.optim.buckets import Bucket, Entry

# Chosen: a piece's tensors (2 MiB each in float32) stay in the cache over its operations. Pieces
# also keep the norm right: torch 2.14 adds up squares in long float32 runs on CPU and is off by
# 3e-3 over the 25 M weights of a token embedding, by 8e-6 in pieces of this size.
CPU_PIECE = 2**19
# Chosen: below this a compiled call costs more than the passes over memory that it saves.
COMPILED_MIN = 2**15
# Chosen: bounds the scratch (the update, 4 bytes an element) to 64 MiB or one larger tensor.
DEVICE_BATCH = 2**24
# Chosen: large enough that the compiler spreads the loop over all threads; 20 MiB for a moment.
COMPILED_ON = 2**20


class Rule(NamedTuple):
    """A step as numbers: u = m / (sqrt(v) + eps) + weight_decay p, r = norm_scale u,
    p -= step_scale ratio u. The bias corrections are folded in, which saves passes over memory."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    norm_scale: float
    step_scale: float


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


def first_pass(batch: Bucket, rule: Rule, clip: Tensor | None) -> First:
    """Update the moments; gradients are multiplied by `clip`."""
    runs = [batch.columns()]
    if len(batch.entries) == 1:
        split = (pieces(tensor) for tensor in batch.entries[0].tensors)
        runs = [[[part] for part in piece] for piece in zip(*split, strict=True)]
    moved: list[Tensor] = []
    updates: list[Tensor] = []
    p_norms: list[Tensor] = []
    u_norms: list[Tensor] = []
    for params, grads, exp_avgs, exp_avg_sqs in runs:
        if clip is not None:
            grads = list(torch._foreach_mul(grads, clip))
        torch._foreach_lerp_(exp_avgs, grads, 1 - rule.beta1)
        torch._foreach_mul_(exp_avg_sqs, rule.beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - rule.beta2)
        u = list(torch._foreach_sqrt(exp_avg_sqs))
        torch._foreach_add_(u, rule.eps)
        torch._foreach_reciprocal_(u)  # not a division: that would need a second scratch
        torch._foreach_mul_(u, exp_avgs)
        torch._foreach_add_(u, params, alpha=rule.weight_decay)
        p_norms += torch._foreach_norm(params)
        u_norms += torch._foreach_norm(u)
        moved += params
        updates += u
    squares = torch.stack([torch.stack(p_norms), torch.stack(u_norms)]).square_()
    if len(batch.entries) == 1:
        squares = squares.sum(dim=1, keepdim=True)
    return First(squares, moved, updates)


def second_pass(first: First, factors: Tensor) -> None:
    """Add factor * u to each tensor; factors are [n]."""
    steps = list(factors.unbind()) * (len(first.params) // len(factors))
    torch._foreach_addcmul_(first.params, first.updates, steps)


def compiled_first_pass(entry: Entry, rule: Rule, clip: Tensor | None, update: Tensor) -> First:
    """`first_pass` of a single flat tensor in one loop over memory; writes u to `update`."""
    squares = _compiled_kernel()(*entry.tensors, update, _scalars(rule), clip)
    return First(squares, entry.tensors[:1], [update])


def compile_first_pass(device: torch.device, dtype: torch.dtype, *, clipped: bool) -> None:
    """Make what `compiled_first_pass` runs: seconds to a minute, the first time in a process.

    On tensors of its own: a failure leaves no parameter half updated, and the code does not depend
    on which parameter came first, so a resumed run computes what the unbroken one would have.
    """
    tensors = [torch.zeros(COMPILED_ON, dtype=dtype, device=device) for _ in range(5)]
    clip = torch.ones((), dtype=dtype, device=device) if clipped else None
    with torch.no_grad():
        _compiled_kernel()(*tensors, _scalars(Rule(0.9, 0.98, 1e-6, 0.0, 1.0, 0.0)), clip)


def _scalars(rule: Rule) -> list[Tensor]:
    """As tensors, so that new values do not compile anew; on CPU: kernels read them there free."""
    numbers = (rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.weight_decay)
    return [torch.tensor(x, dtype=torch.float64) for x in numbers]


@functools.cache
def _compiled_kernel() -> Callable[..., Tensor]:
    """One graph serves flat tensors of any length; `fullgraph` makes an exceeded recompile limit
    an error, not a quiet fallback."""
    return torch.compile(_kernel, dynamic=True, fullgraph=True)


def _kernel(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    update: Tensor,
    scalars: list[Tensor],
    clip: Tensor | None,
) -> Tensor:
    beta1, beta1_rest, beta2, beta2_rest, eps, weight_decay = scalars
    if clip is not None:
        g = g * clip
    new_m = m * beta1 + g * beta1_rest
    new_v = v * beta2 + g * g * beta2_rest
    # u is stored rather than computed again: without the store, torch 2.14 makes two loops of this,
    # one for the sums and one for the moments.
    u = new_m / (new_v.sqrt() + eps) + weight_decay * p
    squares = torch.stack([(p * p).sum(), (u * u).sum()])[:, None]
    m.copy_(new_m)
    v.copy_(new_v)
    update.copy_(u)
    return squares
