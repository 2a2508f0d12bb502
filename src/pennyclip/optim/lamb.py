"""LAMB: Adam's direction, rescaled tensor by tensor to the length of the weights.

    m = beta1 m + (1 - beta1) g                    v = beta2 v + (1 - beta2) g^2
    r = m' / (sqrt(v') + eps) + weight_decay p     p = p - lr * ratio * r,  ratio = |p| / |r|

You et al., "Large Batch Optimization for Deep Learning", arXiv 1904.00962 (v5). The ratio is 1
where either norm is zero. The variants differ in m' and v' and in where the ratio applies:

- "paper": algorithm 2 of v5, m' = m / (1 - beta1^t), v' = v / (1 - beta2^t); all tensors adapt.
- "nvlamb": NVIDIA apex, csrc/multi_tensor_lamb.cu. All gradients are first divided by their global
  norm where that exceeds 1; tensors without weight decay keep ratio 1 unless `always_adapt`.
- "eva": DeepSpeed, csrc/lamb/fused_lamb_cuda_kernel.cu, with which EVA-CLIP (arXiv 2303.15389) was
  trained. m' = m, v' = v, the ratio is clamped to [0.01, 10], and the step is multiplied by
  sqrt(1 - beta2^t) / (1 - beta1^t). (EVA-CLIP ran it under ZeRO-1, where a "tensor" was a flattened
  shard; here it is always a whole parameter.)

A step is two passes over memory: the first updates m and v and sums the squares of p and r, the
second moves p. Where parameters are sharded (DTensor), all sums travel as one stacked vector, so a
ratio is that of the whole tensor. Nothing in a step waits for an accelerator.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT, StateDict

from pennyclip.optim.lamb_passes import (
    COMPILED_MIN,
    CPU_PIECE,
    DEVICE_BATCH,
    Batch,
    Entry,
    First,
    Rule,
    Shard,
    compiled_first_pass,
    first_pass,
    pieces,
    second_pass,
)

Variant = Literal["paper", "nvlamb", "eva"]

EVA_RATIO = (0.01, 10.0)  # min_coeff and max_coeff of DeepSpeed's FusedLamb
NVLAMB_MAX_GRAD_NORM = 1.0  # max_grad_norm of apex.optimizers.FusedLAMB


class Lamb(torch.optim.Optimizer):
    """LAMB over named or unnamed parameters and groups (`lr`, `betas`, `eps`, `weight_decay`).

    The state of a parameter is `step`, `exp_avg`, `exp_avg_sq`, the moments in float32 (8 bytes a
    parameter) or wider; 16-bit parameters are updated in float32 and rounded once.

    Args:
        params: tensors, (name, tensor) pairs, or groups of either.
        lr: the rate; the length of a tensor's step as a share of the tensor's own length.
        betas: (0.9, 0.98), EVA-CLIP, arXiv 2303.15389, as are `eps` and `weight_decay`.
        weight_decay: 0 belongs to norms, biases, class token, position embedding, log scale.
        variant: see the module's description.
        always_adapt: "nvlamb" only (apex's `use_nvlamb`): adapt tensors without weight decay too.
        stochastic_rounding: round bf16 parameters up or down with the probability that keeps the
            mean, since pure bf16 loses updates below about 1/256 of a weight.
        seed: of the rounding noise, a pure function of (seed, step, parameter), so resume replays.
        compile: put the first pass over each large tensor through torch.compile (measured on CPU
            only, benchmarks/optimizer.py). The first step compiles, seconds to a minute; a
            compiler's failure is raised, never replaced by the uncompiled pass.

    Raises:
        ValueError: a value outside its range, or an option that would have no effect.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-6,
        weight_decay: float = 0.05,
        *,
        variant: Variant = "paper",
        always_adapt: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        if variant not in ("paper", "nvlamb", "eva"):
            raise ValueError(f"variant: expected 'paper', 'nvlamb' or 'eva', found {variant!r}")
        if always_adapt and variant != "nvlamb":
            raise ValueError(f"always_adapt belongs to 'nvlamb'; {variant!r} adapts every tensor")
        self._settings = (variant, always_adapt, stochastic_rounding, seed, compile)
        self._last_ratios: list[tuple[list[str], Tensor]] = []
        self._scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        dtypes = {p.dtype for group in self.param_groups for p in group["params"]}
        if stochastic_rounding and torch.bfloat16 not in dtypes:
            raise ValueError(f"stochastic_rounding needs bfloat16 parameters, found {dtypes}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for key, valid in {
            "lr": group["lr"] >= 0,
            "betas": all(0 <= beta < 1 for beta in group["betas"]),
            "eps": group["eps"] > 0,
            "weight_decay": group["weight_decay"] >= 0,
            "params": all(p.is_floating_point() for p in group["params"]),
        }.items():
            if not valid:
                raise ValueError(f"group {len(self.param_groups) - 1}, {key}: found {group[key]}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; gradients are left as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = list(self._batches())
        clip = _inverse_global_norm(batches) if self._settings[0] == "nvlamb" else None
        self._last_ratios = []
        waiting: defaultdict[Shard, list[tuple[Batch, First]]] = defaultdict(list)
        for batch in batches:
            if batch.compiled:
                first = compiled_first_pass(batch, clip, self._scratch_for(batch))
            else:
                first = first_pass(batch, clip)
            if batch.shard is None:  # at once, while the tensors are still in the cache
                self._second_pass(batch, first, first.squares)
            else:
                waiting[batch.shard].append((batch, first))
        for shard, firsts in waiting.items():
            vectors = [first.squares for _, first in firsts]
            total = _all_reduce(torch.cat(vectors, dim=1), shard)
            parts = torch.split(total, [len(batch.entries) for batch, _ in firsts], dim=1)
            for (batch, first), squares in zip(firsts, parts, strict=True):
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

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As torch's, but the moments keep float32 where torch casts them to the parameter's
        dtype, and nothing is shared with `state_dict`."""
        super().load_state_dict(state_dict)
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, p in zip(saved_ids, params, strict=True):
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if key == "step":
                    self.state[p][key] = value.clone()
                else:
                    self.state[p][key] = value.to(p.device, _state_dtype(p), copy=True)

    def __getstate__(self) -> dict[str, Any]:
        # For deepcopy and pickle: torch's own leaves every other attribute out.
        own = {"_settings": self._settings, "_last_ratios": self._last_ratios, "_scratch": {}}
        return {**super().__getstate__(), **own}

    def _second_pass(self, batch: Batch, first: First, squares: Tensor) -> None:
        """Turn the squared norms of p and u, [2, n], into ratios and move p."""
        p_norm, u_norm = squares.sqrt().unbind()
        if batch.adapt:
            ratio = p_norm / (u_norm * batch.rule.norm_scale)
            if self._settings[0] == "eva":
                ratio = ratio.clamp(*EVA_RATIO)
            ratio = torch.where((p_norm == 0) | (u_norm == 0), 1.0, ratio)
        else:
            ratio = torch.ones_like(p_norm)
        self._last_ratios.append(([entry.name for entry in batch.entries], ratio))
        second_pass(batch, first, ratio * -batch.rule.step_scale)

    def _scratch_for(self, batch: Batch) -> Tensor:
        """Room for one tensor's update. It is kept, since fresh pages cost a fifth of a step."""
        m = batch.entries[0].tensors[2]
        if batch.shard is not None:  # many wait at once for the sums of the other ranks
            return torch.empty_like(m)
        scratch = self._scratch.get((m.device, m.dtype))
        if scratch is None or scratch.numel() < m.numel():
            scratch = torch.empty(m.numel(), dtype=m.dtype, device=m.device)
            self._scratch[(m.device, m.dtype)] = scratch
        return scratch[: m.numel()].view(m.shape)

    def _batches(self) -> Iterator[Batch]:
        variant, always_adapt, stochastic_rounding, seed, compile = self._settings
        buckets: defaultdict[tuple[Any, ...], list[Entry]] = defaultdict(list)
        number = -1
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
            for name, p in zip(names, group["params"], strict=True):
                number += 1
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ValueError(f"{name}: LAMB needs a dense gradient, found a sparse one")
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)  # on CPU: read for free
                    state["exp_avg"] = torch.zeros_like(p, dtype=_state_dtype(p))
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=_state_dtype(p))
                state["step"] += 1
                step, shard = int(state["step"].item()), _shard_of(name, p)
                rounded = stochastic_rounding and p.dtype == torch.bfloat16
                noise_seed = _noise_seed(seed, step, number, shard) if rounded else None
                tensors = _local(p.detach(), p.grad, state["exp_avg"], state["exp_avg_sq"])
                key = (p.device, p.dtype, shard, i, step)
                buckets[key].append(Entry(name, p.numel(), tensors, noise_seed))
        for (device, _, shard, i, step), entries in buckets.items():
            group = self.param_groups[i]
            limit = CPU_PIECE if device.type == "cpu" else DEVICE_BATCH
            limit = COMPILED_MIN if compile else limit
            for part in _parts(entries, limit):
                yield Batch(
                    entries=part,
                    rule=_rule(variant, group, step),
                    adapt=variant != "nvlamb" or always_adapt or group["weight_decay"] > 0,
                    shard=shard,
                    compiled=compile and part[0].size > limit,
                )


def _rule(variant: Variant, group: dict[str, Any], step: int) -> Rule:
    (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
    root = (1 - beta2**step) ** 0.5
    scale = root / (1 - beta1**step)
    if variant == "eva":
        return Rule(beta1, beta2, eps, decay, 1.0, group["lr"] * scale)
    return Rule(beta1, beta2, eps * root, decay / scale, scale, group["lr"] * scale)


def _state_dtype(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def _parts(entries: list[Entry], limit: int) -> Iterator[list[Entry]]:
    """Each tensor of more than `limit` elements by itself, the others together up to `limit`."""
    run: list[Entry] = []
    size = 0
    for entry in entries:
        if entry.size > limit:
            yield [entry]
            continue
        if size + entry.size > limit:
            yield run
            run, size = [], 0
        run.append(entry)
        size += entry.size
    if run:
        yield run


def _local(*tensors: Tensor) -> list[Tensor]:
    """What this rank holds, flat where memory order is the index order in all."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [t.view(-1) for t in local] if all(t.is_contiguous() for t in local) else local


def _shard_of(name: str, p: Tensor) -> Shard | None:
    if not isinstance(p, DTensor):
        return None
    if not isinstance(p.grad, DTensor) or p.grad.placements != p.placements:
        raise ValueError(f"{name}: its gradient must be placed as {p.placements}, found {p.grad!r}")
    split = (i for i, place in enumerate(p.placements) if not place.is_replicate())
    dims = tuple(i for i in split if p.device_mesh.size(i) > 1)
    return (p.device_mesh, dims) if dims else None


def _all_reduce(squares: Tensor, shard: Shard) -> Tensor:
    mesh, dims = shard
    for dim in dims:
        dist.all_reduce(squares, group=mesh.get_group(dim))
    return squares


def _inverse_global_norm(batches: Iterable[Batch]) -> Tensor | None:
    """1 / max(1, norm of all gradients), on the device; None where there are no gradients."""
    sums: defaultdict[Shard | None, list[Tensor]] = defaultdict(list)
    for batch in batches:
        grads = list(chain.from_iterable(pieces(entry.tensors[1]) for entry in batch.entries))
        dtype = batch.entries[0].tensors[2].dtype
        norms = torch.stack(list(torch._foreach_norm(grads, dtype=dtype)))
        sums[batch.shard].append(norms.square().sum())
    totals = []
    for shard, parts in sums.items():
        total = torch.stack(parts).sum()
        totals.append(total if shard is None else _all_reduce(total, shard))
    if not totals:
        return None
    norm = torch.stack(totals).sum().sqrt()
    return (norm / NVLAMB_MAX_GRAD_NORM).clamp(min=1.0).reciprocal()


def _noise_seed(seed: int, step: int, number: int, shard: Shard | None) -> int:
    """63 bits from (seed, step, parameter) and, where ranks hold different parts, the part."""
    part = [shard[0].get_local_rank(dim) for dim in shard[1]] if shard else []
    digest = hashlib.blake2b(repr((seed, step, number, part)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
