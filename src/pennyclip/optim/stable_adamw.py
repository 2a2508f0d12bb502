"""StableAdamW: AdamW whose rate falls, tensor by tensor, where gradients outgrow their past.

    RMS = sqrt(mean(g^2 / max(v', eps^2)))         lr' = lr / max(1, RMS)
    p = p - lr' (m' / (sqrt(v') + eps) + weight_decay p)

Wortsman et al. 2023, "Stable and low-precision training for large-scale vision-language models",
arXiv 2304.13013, algorithm 2; m' and v' are Adam's moments with the bias corrected. Gradients that
are larger than v has yet learned would otherwise make steps many times the rate, which is how loss
spikes begin there. Where RMS is at most 1 everywhere, this is AdamW, and its state is AdamW's.

Where parameters are sharded (DTensor), an RMS is that of the whole tensor: the ranks' sums travel
as one vector.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from pennyclip.optim.buckets import Bucket, Sharding, buckets, whole_sums

CHUNK = 2**24  # chosen: bounds the scratch, three times 4 bytes an element, to 192 MiB


class StableAdamW(torch.optim.Optimizer):
    """Over groups with `lr`, `betas`, `eps`, `weight_decay`; a step waits for no accelerator.

    The state of a parameter is `step`, `exp_avg` and `exp_avg_sq`, in the parameter's dtype.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        waiting: defaultdict[Sharding, list[tuple[Bucket, Tensor, list[Tensor]]]]
        waiting = defaultdict(list)
        for chunk in chain.from_iterable(bucket.parts(CHUNK) for bucket in buckets(self)):
            squares, root = _first_pass(chunk)
            if chunk.sharding is None:
                _second_pass(chunk, squares, root)
            else:
                waiting[chunk.sharding].append((chunk, squares, root))
        for sharding, firsts in waiting.items():
            totals = whole_sums([squares for _, squares, _ in firsts], sharding)
            for (chunk, _, root), squares in zip(firsts, totals, strict=True):
                _second_pass(chunk, squares, root)
        return loss


def _first_pass(chunk: Bucket) -> tuple[Tensor, list[Tensor]]:
    """Update the moments.

    Returns:
        Of each tensor, this rank's share of RMS^2, [n]; and sqrt(v').
    """
    _, grads, m, v = chunk.columns()
    (beta1, beta2), eps = chunk.group["betas"], chunk.group["eps"]
    torch._foreach_lerp_(m, grads, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
    root = list(torch._foreach_sqrt(v))
    torch._foreach_div_(root, (1 - beta2**chunk.step) ** 0.5)
    grown = torch._foreach_div(grads, torch._foreach_clamp_min(root, eps))
    shares = [x.square_().sum() / entry.size for x, entry in zip(grown, chunk.entries, strict=True)]
    return torch.stack(shares), root


def _second_pass(chunk: Bucket, squares: Tensor, root: list[Tensor]) -> None:
    """Move the parameters: `squares` are the RMS^2 of the whole tensors."""
    params, _, m, _ = chunk.columns()
    group = chunk.group
    rates = -group["lr"] / squares.sqrt().clamp_(min=1.0)
    torch._foreach_add_(root, group["eps"])
    steps = torch._foreach_div(m, root)
    torch._foreach_div_(steps, 1 - group["betas"][0] ** chunk.step)
    torch._foreach_add_(steps, params, alpha=group["weight_decay"])
    torch._foreach_mul_(steps, list(rates.unbind()))
    torch._foreach_add_(params, steps)
