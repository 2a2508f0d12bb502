"""StableAdamW: AdamW whose rate falls, tensor by tensor, where gradients outgrow their past.

    RMS = sqrt(mean(g^2 / max(v', eps^2)))         lr' = lr / max(1, RMS)
    p = p - lr' (m' / (sqrt(v') + eps) + weight_decay p)

Wortsman et al. 2023, "Stable and low-precision training for large-scale vision-language models",
arXiv 2304.13013, algorithm 2; m' and v' are Adam's moments with the bias corrected. Gradients that
are larger than v has yet learned would otherwise make steps many times the rate, which is how loss
spikes begin there. Where RMS is at most 1 everywhere, this is AdamW, and its state is AdamW's.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

CHUNK = 2**24  # chosen: bounds the scratch, three times 4 bytes an element, to 192 MiB

Tensors = list[Tensor]
"""A parameter, its gradient, and its two moments."""


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
        for group in self.param_groups:
            alike: defaultdict[Any, list[Tensors]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)  # on CPU: read for free
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                key = (p.device, p.dtype, int(state["step"].item()))
                alike[key].append([p, p.grad, state["exp_avg"], state["exp_avg_sq"]])
            for (_, _, step), entries in alike.items():
                for chunk in _chunks(entries):
                    _update(chunk, group, step)
        return loss


def _chunks(entries: list[Tensors]) -> Iterator[list[Tensors]]:
    chunk: list[Tensors] = []
    size = 0
    for entry in entries:
        if chunk and size + entry[0].numel() > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(entry)
        size += entry[0].numel()
    if chunk:
        yield chunk


def _update(entries: list[Tensors], group: dict[str, Any], step: int) -> None:
    params, grads, m, v = (list(tensors) for tensors in zip(*entries, strict=True))
    (beta1, beta2), eps = group["betas"], group["eps"]
    torch._foreach_lerp_(m, grads, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
    root = torch._foreach_sqrt(v)
    torch._foreach_div_(root, (1 - beta2**step) ** 0.5)
    grown = torch._foreach_div(grads, torch._foreach_clamp_min(root, eps))
    rms = torch.stack([x.square_().mean() for x in grown]).sqrt()
    del grown
    rates = -group["lr"] / rms.clamp_(min=1.0)
    torch._foreach_add_(root, eps)
    steps = torch._foreach_div(m, root)
    torch._foreach_div_(steps, 1 - beta1**step)
    torch._foreach_add_(steps, params, alpha=group["weight_decay"])
    torch._foreach_mul_(steps, list(rates.unbind()))
    torch._foreach_add_(params, steps)
