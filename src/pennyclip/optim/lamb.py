"""LAMB: Adam's direction, rescaled tensor by tensor to the length of the weights.

    m = beta1 m + (1 - beta1) g                    v = beta2 v + (1 - beta2) g^2
    r = m' / (sqrt(v') + eps) + weight_decay p     p = p - lr * ratio * r,  ratio = |p| / |r|

You et al., "Large Batch Optimization for Deep Learning", arXiv 1904.00962 (v5). The ratio is 1
where either norm is zero. The variants differ in m' and v' and in where the ratio applies:

- "paper": algorithm 2 of v5, m' = m / (1 - beta1^t), v' = v / (1 - beta2^t); all tensors adapt.
- "nvlamb": NVIDIA/apex, csrc/multi_tensor_lamb.cu, with its defaults: the paper's, but all
  gradients are first divided by their global norm where that exceeds 1, and tensors without weight
  decay keep ratio 1 (in apex, unless `use_nvlamb`).
- "eva": DeepSpeed, csrc/lamb/fused_lamb_cuda_kernel.cu, as it was when EVA-CLIP (arXiv 2303.15389)
  was trained with it, in versions 0.6.5 and 0.8.1: m' = m, v' = v, the ratio is clamped to
  [0.01, 10], and the step is multiplied by sqrt(1 - beta2^t) / (1 - beta1^t). (DeepSpeed has since
  gone over to the paper's m' and v'. EVA-CLIP ran it under ZeRO-1, where a "tensor" was a flattened
  shard; here it is always a whole parameter.)

A step is two passes over memory: the first updates m and v and sums the squares of p and r, the
second moves p. Where parameters are sharded (DTensor), all sums travel as one stacked vector, so a
ratio is that of the whole tensor. Nothing in a step waits for an accelerator.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from pennyclip.optim.buckets import Bucket, Sharding, all_reduce, buckets, whole_sums
from pennyclip.optim.lamb_passes import (
    COMPILED_MIN,
    CPU_PIECE,
    DEVICE_BATCH,
    First,
    Rule,
    compile_first_pass,
    compiled_first_pass,
    first_pass,
    pieces,
    second_pass,
)

Variant = Literal["paper", "nvlamb", "eva"]

EVA_RATIO = (0.01, 10.0)
"""min_coeff and max_coeff: baaivision/EVA, EVA-CLIP/rei/training/deepspeed_config.json."""
NVLAMB_MAX_GRAD_NORM = 1.0
"""max_grad_norm of apex.optimizers.FusedLAMB."""


class Lamb(torch.optim.Optimizer):
    """LAMB over named or unnamed parameters and groups (`lr`, `betas`, `eps`, `weight_decay`).

    The state of a parameter is `step`, and `exp_avg` and `exp_avg_sq` in its dtype: float32 or
    float64. (16-bit weights have float32 masters, or are rounded after the step: `narrow.py`.)

    Args:
        params: tensors, (name, tensor) pairs, or groups of either.
        lr: the rate; the length of a tensor's step as a share of the tensor's own length.
        betas: (0.9, 0.98) with `eps` 1e-6: EVA-CLIP's, in the file that EVA_RATIO names.
        weight_decay: 0.05 is EVA-CLIP's (EVA-CLIP/README.md). 0 belongs to norms, biases, class
            token, position embedding, log scale.
        variant: see the module's description.

    Raises:
        ValueError: a value outside its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.05,
        *,
        variant: Variant = "paper",
    ) -> None:
        if variant not in ("paper", "nvlamb", "eva"):
            raise ValueError(f"variant: expected 'paper', 'nvlamb' or 'eva', found {variant!r}")
        self._variant = variant
        self._compiled = False
        self._last_ratios: list[tuple[list[str], Tensor]] = []
        self._scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        dtypes = {p.dtype for p in group["params"]}
        for key, valid, found in (
            ("lr", group["lr"] >= 0, group["lr"]),
            ("betas", all(0 <= beta < 1 for beta in group["betas"]), group["betas"]),
            ("eps", group["eps"] > 0, group["eps"]),
            ("weight_decay", group["weight_decay"] >= 0, group["weight_decay"]),
            ("params in float32 or float64", dtypes <= {torch.float32, torch.float64}, dtypes),
        ):
            if not valid:
                raise ValueError(f"group {len(self.param_groups) - 1}, {key}: found {found}")

    def compile(self, on: bool = True) -> None:
        """Put the first pass over each large tensor through torch.compile from now on, or not.

        Measured on CPU only: benchmarks/optimizer.py. Compiling takes seconds to a minute, here.

        Raises:
            Exception: the compiler's own. Steps then go on as they were.
        """
        if on:
            for kind in {(p.device, p.dtype) for g in self.param_groups for p in g["params"]}:
                compile_first_pass(*kind, clipped=self._variant == "nvlamb")
        self._compiled = on

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; gradients are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = list(self._batches())
        clip = _inverse_global_norm(batches) if self._variant == "nvlamb" else None
        self._last_ratios = []
        waiting: defaultdict[Sharding, list[tuple[Bucket, First]]] = defaultdict(list)
        for batch in batches:
            first = self._first_pass(batch, clip)
            if batch.sharding is None:  # at once, while the tensors are still in the cache
                self._second_pass(batch, first, first.squares)
            else:
                waiting[batch.sharding].append((batch, first))
        for sharding, firsts in waiting.items():
            totals = whole_sums([first.squares for _, first in firsts], sharding)
            for (batch, first), squares in zip(firsts, totals, strict=True):
                self._second_pass(batch, first, squares)
        return loss

    def trust_ratios(self) -> dict[str, float]:
        """Each tensor's ratio in the last step, by name ("group.index" where unnamed).

        This is the one call that waits for the device."""
        return {
            name: ratio
            for names, ratios in self._last_ratios
            for name, ratio in zip(names, ratios.tolist(), strict=True)
        }

    def __getstate__(self) -> dict[str, Any]:
        # For deepcopy and pickle: torch's own leaves every other attribute out.
        own = {"_variant": self._variant, "_compiled": self._compiled}
        return {**super().__getstate__(), **own, "_last_ratios": self._last_ratios, "_scratch": {}}

    def _batches(self) -> Iterator[Bucket]:
        for bucket in buckets(self):
            if self._compiled:
                yield from bucket.parts(COMPILED_MIN)
            else:
                yield from bucket.parts(CPU_PIECE if bucket.device.type == "cpu" else DEVICE_BATCH)

    def _first_pass(self, batch: Bucket, clip: Tensor | None) -> First:
        rule, entry = _rule(self._variant, batch), batch.entries[0]
        if self._compiled and entry.size > COMPILED_MIN and entry.tensors[0].dim() == 1:
            return compiled_first_pass(entry, rule, clip, self._scratch_for(batch))
        return first_pass(batch, rule, clip)

    def _second_pass(self, batch: Bucket, first: First, squares: Tensor) -> None:
        """Turn the squared norms of p and u, [2, n], into ratios and move p."""
        rule = _rule(self._variant, batch)
        p_norm, u_norm = squares.sqrt().unbind()
        if self._variant != "nvlamb" or rule.weight_decay > 0:
            ratio = p_norm / (u_norm * rule.norm_scale)
            if self._variant == "eva":
                ratio = ratio.clamp(*EVA_RATIO)
            ratio = torch.where((p_norm == 0) | (u_norm == 0), 1.0, ratio)
        else:
            ratio = torch.ones_like(p_norm)
        self._last_ratios.append(([entry.name for entry in batch.entries], ratio))
        second_pass(first, ratio * -rule.step_scale)

    def _scratch_for(self, batch: Bucket) -> Tensor:
        """Room for one tensor's update. It is kept, since fresh pages cost a fifth of a step."""
        p = batch.entries[0].tensors[0]
        if batch.sharding is not None:  # many wait at once for the sums of the other ranks
            return torch.empty_like(p)
        scratch = self._scratch.get((p.device, p.dtype))
        if scratch is None or scratch.numel() < p.numel():
            scratch = torch.empty(p.numel(), dtype=p.dtype, device=p.device)
            self._scratch[(p.device, p.dtype)] = scratch
        return scratch[: p.numel()]


def _rule(variant: Variant, batch: Bucket) -> Rule:
    group = batch.group
    (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
    root = (1 - beta2**batch.step) ** 0.5
    scale = root / (1 - beta1**batch.step)
    if variant == "eva":
        return Rule(beta1, beta2, eps, decay, 1.0, group["lr"] * scale)
    return Rule(beta1, beta2, eps * root, decay / scale, scale, group["lr"] * scale)


def _inverse_global_norm(batches: Iterable[Bucket]) -> Tensor | None:
    """1 / max(1, norm of all gradients), on the device; None where there are no gradients."""
    sums: defaultdict[Sharding | None, list[Tensor]] = defaultdict(list)
    for batch in batches:
        grads = list(chain.from_iterable(pieces(entry.tensors[1]) for entry in batch.entries))
        norms = torch.stack(list(torch._foreach_norm(grads)))
        sums[batch.sharding].append(norms.square().sum())
    totals = []
    for sharding, parts in sums.items():
        total = torch.stack(parts).sum()
        totals.append(total if sharding is None else all_reduce(total, sharding))
    if not totals:
        return None
    norm = torch.stack(totals).sum().sqrt()
    return (norm / NVLAMB_MAX_GRAD_NORM).clamp(min=1.0).reciprocal()
