"""Pure 16-bit precisions: weights and gradients have 16 bits while an update computes gradients.

Everywhere else (optimizer, evaluation, checkpoints, averages) the model is in float32: these are
the masters. They lie aside meanwhile; or, with stochastic rounding, there are none: the weights are
values that bfloat16 has, given up on the way in and had again from their 16 bits on the way out.
In float32 always: the temperature, BatchNorms with their statistics, and modules to which a recipe
gives that (`precision.assign`).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pennyclip.config.keys import Precision
from pennyclip.training.update.precision import PURE, own_dtype
from pennyclip.training.update.rounding import NOISE, stochastic


@contextmanager
def narrowed(
    model: nn.Module,
    precision: Precision,
    *,
    masters: bool = True,
    accumulate: bool = False,
    stored: Collection[nn.Module] = (),
) -> Iterator[None]:
    """Inside, a pure precision's weights have 16 bits; outside, weights and gradients are float32.

    Args:
        model: with no gradients yet. Parameters stay the same objects.
        precision: of the run; under other precisions nothing happens.
        masters: keep the float32 values of what learns. Without, they are lost to 16 bits.
        accumulate: several backward passes follow each other, whose gradients are to be added up
            in float32.
        stored: parts of which only what learns is used, the rest having run before.
    """
    if precision not in PURE:
        yield
        return
    idle = {p for part in stored for p in part.parameters() if not p.requires_grad}
    weights = {p: to for p, to in _weights(model, PURE[precision]).items() if p not in idle}
    kept: dict[Tensor, Tensor | None] = {}
    gradients: dict[Tensor, Tensor] = {}

    def add(p: Tensor) -> None:
        assert p.grad is not None
        gradients[p] = gradients[p].add_(p.grad) if p in gradients else p.grad.float()
        p.grad = None

    learning = [p for p in weights if p.requires_grad]
    hooks = [
        p.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
        for p in learning
        if accumulate
    ]
    try:
        for p, dtype in weights.items():
            kept[p] = p.data if masters or not p.requires_grad else None
            p.data = p.data.to(dtype)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for p, master in kept.items():
            if p.grad is not None:
                gradients[p], p.grad = p.grad, None
            p.data = p.data.float() if master is None else master
        for p in learning:
            if p in gradients:
                p.grad = gradients.pop(p).float()


@torch.no_grad()
def round_weights(model: nn.Module, precision: Precision, seed: int) -> None:
    """Round what learns and has no masters to bfloat16's values, stochastically.

    Args:
        seed: of the noise: an update that is made again rounds again alike.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for p, dtype in _weights(model, PURE[precision]).items():
        if p.requires_grad and dtype == torch.bfloat16:
            if p.device not in generators:
                generators[p.device] = torch.Generator(p.device).manual_seed(seed)
            noise = torch.empty_like(p, dtype=torch.int32)
            noise.random_(0, NOISE, generator=generators[p.device])
            p.copy_(stochastic(p, noise))


def _weights(model: nn.Module, dtype: torch.dtype) -> dict[Tensor, torch.dtype]:
    """What has 16 bits, and which: parameters, and buffers that are used beside them."""
    found: dict[Tensor, torch.dtype] = {}
    for module in model.modules():
        own = own_dtype(module) or dtype
        wide = module is model or isinstance(module, nn.modules.batchnorm._BatchNorm)
        parameters = list(module.parameters(recurse=False))
        if parameters and not wide and own != torch.float32:
            weights = (*parameters, *module.buffers(recurse=False))
            found |= {w: own for w in weights if w.is_floating_point()}
    return found
