"""LAMB: Adam's direction, rescaled tensor by tensor to the length of the weights.

    m = beta1 m + (1 - beta1) g                    v = beta2 v + (1 - beta2) g^2
    r = m' / (sqrt(v') + eps) + weight_decay p     p = p - lr * ratio * r,  ratio = |p| / |r|

You et al., "Large Batch Optimization for Deep Learning", arXiv 1904.00962 (v5). The ratio is 1 where
either norm is zero. The three variants differ in m' and v' and in where the ratio applies:

- "paper": algorithm 2 of v5, m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t); every tensor adapts.
- "nvlamb": NVIDIA apex, csrc/multi_tensor_lamb.cu. All gradients are first divided by their global
  norm where that exceeds 1; tensors without weight decay keep ratio 1 unless `always_adapt`.
- "eva": DeepSpeed, csrc/lamb/fused_lamb_cuda_kernel.cu, with which EVA-CLIP (arXiv 2303.15389) was
  trained. m' = m, v' = v, the ratio is clamped to [0.01, 10], and the step is multiplied by
  sqrt(1 - beta2^t) / (1 - beta1^t). (EVA-CLIP ran it under ZeRO-1, where a "tensor" was a flattened
  shard; here it is always a whole parameter.)

A step is two passes over memory: one updates m and v and sums the squares of p and r, the next moves
p. Where parameters are sharded (DTensor), the sums of all of them travel as one stacked vector, so
the ratio is that of the whole tensor. Nothing in a step waits for an accelerator.
"""

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.optim.optimizer import ParamsT, StateDict

Variant = Literal["paper", "nvlamb", "eva"]

EVA_RATIO = (0.01, 10.0)  # min_coeff and max_coeff of DeepSpeed's FusedLamb
NVLAMB_MAX_GRAD_NORM = 1.0  # max_grad_norm of apex.optimizers.FusedLAMB

# Chosen by benchmarks/optimizer.py: 1 MiB of float32 keeps a piece's operations in a core's cache.
# It is also what keeps the norm right: torch 2.14 sums squares on CPU in one float32 run, 0.3 % off
# over the 25 M weights of a token embedding; pieces of this size are exact to 1e-6.
CPU_PIECE = 2**18
# Chosen: below this a compiled call costs more than the passes over memory that it saves.
CPU_COMPILED_MIN = 2**15
# Chosen: bounds the scratch (the update, 4 bytes an element) to 64 MiB or one larger tensor.
DEVICE_BATCH = 2**24

Shard = tuple[DeviceMesh, tuple[int, ...]]  # the mesh, and its dimensions that split the tensor


class _Rule(NamedTuple):
    """A step as numbers: u = m / (sqrt(v) + eps) + weight_decay p, r = norm_scale u,
    p -= step_scale ratio u. The bias corrections are folded in, which saves passes over memory."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    norm_scale: float
    step_scale: float | Tensor


class _Entry(NamedTuple):
    name: str
    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    noise_seed: int | None


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Tensors of one group, dtype, step count and device whose passes run together."""

    entries: list[_Entry]
    rule: _Rule
    adapt: bool
    shard: Shard | None
    compiled: bool


# The second pass, given the factor of each tensor's update [n].
_Apply = Callable[[Tensor], None]


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
        compile: run both passes through torch.compile. The first step compiles (seconds to a
            minute); a compiler's failure is raised, never replaced by the uncompiled passes.

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
        waiting: defaultdict[Shard, list[tuple[_Batch, Tensor, _Apply]]] = defaultdict(list)
        for batch in batches:
            run = _compiled_first_pass if batch.compiled else _first_pass
            squares, apply = run(batch, clip)
            if batch.shard is None:  # at once, while the tensors are still in the cache
                self._second_pass(batch, squares, apply)
            else:
                waiting[batch.shard].append((batch, squares, apply))
        for shard, firsts in waiting.items():
            total = _all_reduce(torch.cat([squares for _, squares, _ in firsts], dim=1), shard)
            parts = total.split([squares.shape[1] for _, squares, _ in firsts], dim=1)
            for (batch, _, apply), squares in zip(firsts, parts, strict=True):
                self._second_pass(batch, squares, apply)
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

    def __getstate__(
        self,
    ) -> dict[str, Any]:  # torch's keeps three attributes; for deepcopy, pickle
        own = {key: self.__dict__[key] for key in ("_settings", "_last_ratios")}
        return {**super().__getstate__(), **own}  # type: ignore[no-untyped-call]

    def _second_pass(self, batch: _Batch, squares: Tensor, apply: _Apply) -> None:
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
        apply(ratio * -batch.rule.step_scale)

    def _batches(self) -> Iterator[_Batch]:
        variant, always_adapt, stochastic_rounding, seed, compile = self._settings
        buckets: defaultdict[tuple[Any, ...], list[_Entry]] = defaultdict(list)
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
                entry = _Entry(name, *tensors, noise_seed=noise_seed)
                dtypes = (entry.param.dtype, entry.grad.dtype)
                buckets[(entry.param.device, *dtypes, shard, i, step)].append(entry)
        for (device, _, _, shard, i, step), entries in buckets.items():
            group = self.param_groups[i]
            cpu = device.type == "cpu"
            limit = DEVICE_BATCH if not cpu else CPU_COMPILED_MIN if compile else CPU_PIECE
            for part in [entries] if compile and not cpu else _consecutive(entries, limit):
                yield _Batch(
                    entries=part,
                    rule=_rule(variant, group, step),
                    adapt=variant != "nvlamb" or always_adapt or group["weight_decay"] > 0,
                    shard=shard,
                    compiled=compile and (not cpu or part[0].param.numel() > limit),
                )


def _rule(variant: Variant, group: dict[str, Any], step: int) -> _Rule:
    (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
    root = (1 - beta2**step) ** 0.5
    scale = root / (1 - beta1**step)
    if variant == "eva":
        return _Rule(beta1, beta2, eps, decay, 1.0, group["lr"] * scale)
    return _Rule(beta1, beta2, eps * root, decay / scale, scale, group["lr"] * scale)


def _state_dtype(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def _consecutive(entries: list[_Entry], limit: int) -> Iterator[list[_Entry]]:
    """Runs of at most `limit` elements; a larger tensor is a run by itself."""
    run: list[_Entry] = []
    size = 0
    for entry in entries:
        if run and size + entry.param.numel() > limit:
            yield run
            run, size = [], 0
        run.append(entry)
        size += entry.param.numel()
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


def _inverse_global_norm(batches: Iterable[_Batch]) -> Tensor | None:
    """1 / max(1, norm of all gradients), on the device; None where there are no gradients."""
    sums: defaultdict[Shard | None, list[Tensor]] = defaultdict(list)
    for batch in batches:
        pieces = list(chain.from_iterable(_pieces(entry.grad) for entry in batch.entries))
        dtype = batch.entries[0].exp_avg.dtype
        norms = torch.stack(list(torch._foreach_norm(pieces, dtype=dtype)))
        sums[batch.shard].append(norms.square().sum())
    totals = []
    for shard, parts in sums.items():
        total = torch.stack(parts).sum()
        totals.append(total if shard is None else _all_reduce(total, shard))
    if not totals:
        return None
    norm = torch.stack(totals).sum().sqrt()
    return (norm / NVLAMB_MAX_GRAD_NORM).clamp(min=1.0).reciprocal()


def _pieces(tensor: Tensor) -> list[Tensor]:
    """A large flat CPU tensor in parts, see CPU_PIECE; anything else whole."""
    if tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.numel() > CPU_PIECE:
        return list(tensor.split(CPU_PIECE))
    return [tensor]


def _first_pass(batch: _Batch, clip: Tensor | None) -> tuple[Tensor, _Apply]:
    """Update the moments; return the squared norms of p and u, [2, n], and the second pass."""
    rule, wide = batch.rule, batch.entries[0].exp_avg.dtype
    columns = [[e.param, e.grad, e.exp_avg, e.exp_avg_sq] for e in batch.entries]
    runs = [columns]
    if len(columns) == 1:
        runs = [[list(piece)] for piece in zip(*map(_pieces, columns[0]), strict=True)]
    moved: list[tuple[list[Tensor], list[Tensor]]] = []
    p_norms: list[Tensor] = []
    u_norms: list[Tensor] = []
    for run in runs:
        params, grads, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*run, strict=True))
        wide_params = [p.to(wide) for p in params]
        grads = [g.to(wide) for g in grads]
        if clip is not None:
            grads = list(torch._foreach_mul(grads, clip))
        torch._foreach_lerp_(exp_avgs, grads, 1 - rule.beta1)
        torch._foreach_mul_(exp_avg_sqs, rule.beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - rule.beta2)
        updates = list(torch._foreach_sqrt(exp_avg_sqs))
        torch._foreach_add_(updates, rule.eps)
        torch._foreach_reciprocal_(updates)  # not a division: that would need a second scratch
        torch._foreach_mul_(updates, exp_avgs)
        torch._foreach_add_(updates, wide_params, alpha=rule.weight_decay)
        p_norms += torch._foreach_norm(wide_params)
        u_norms += torch._foreach_norm(updates)
        moved.append((params, updates))
    squares = torch.stack([torch.stack(p_norms), torch.stack(u_norms)]).square_()
    if len(columns) == 1:
        squares = squares.sum(dim=1, keepdim=True)

    def apply(factors: Tensor) -> None:
        noises = [_noise(entry) for entry in batch.entries]
        for i, (params, updates) in enumerate(moved):
            steps = list(factors.unbind()) if len(moved) == 1 else [factors[0]]
            wide_params = [p.to(wide) for p in params]
            torch._foreach_addcmul_(wide_params, updates, steps)
            for j, (p, wide_p) in enumerate(zip(params, wide_params, strict=True)):
                noise = noises[j] if len(moved) == 1 else noises[0]
                if noise is not None:
                    part = noise if len(moved) == 1 else noise.split(CPU_PIECE)[i]
                    p.copy_(_round_stochastically(wide_p, part))
                elif p.dtype != wide:
                    p.copy_(wide_p)

    return squares, apply


def _compiled_first_pass(batch: _Batch, clip: Tensor | None) -> tuple[Tensor, _Apply]:
    """`_first_pass` with one kernel a pass; the second computes u again instead of storing it."""
    first, second = _compiled_passes(batch.entries[0].param.device.type == "cpu")
    # As tensors, so that new values do not compile anew; on CPU, where a kernel reads them free.
    rule = [torch.tensor(x, dtype=torch.float64) for x in batch.rule[:4]]
    params = [e.param for e in batch.entries]
    exp_avgs = [e.exp_avg for e in batch.entries]
    exp_avg_sqs = [e.exp_avg_sq for e in batch.entries]
    squares = first(params, [e.grad for e in batch.entries], exp_avgs, exp_avg_sqs, rule, clip)

    def apply(factors: Tensor) -> None:
        noises = [_noise(entry) for entry in batch.entries]
        second(params, exp_avgs, exp_avg_sqs, rule, factors, noises)

    return squares, apply


@functools.cache
def _compiled_passes(flat: bool) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """On CPU one graph serves a flat tensor of any length; elsewhere one holds all tensors.

    `fullgraph` makes an exceeded recompile limit an error rather than a quiet fallback."""
    return (
        torch.compile(_fused_first, dynamic=flat, fullgraph=True),
        torch.compile(_fused_second, dynamic=flat, fullgraph=True),
    )


def _fused_first(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    rule: list[Tensor],
    clip: Tensor | None,
) -> Tensor:
    beta1, beta2 = rule[:2]
    squares = []
    for p, grad, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        g = grad.to(m.dtype)
        if clip is not None:
            g = g * clip
        m.copy_(m * beta1 + g * (1 - beta1))
        v.copy_(v * beta2 + g * g * (1 - beta2))
        wide_p, update = _update(p, m, v, rule)
        squares.append(torch.stack([(wide_p * wide_p).sum(), (update * update).sum()]))
    return torch.stack(squares, dim=1)


def _fused_second(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    rule: list[Tensor],
    factors: Tensor,
    noises: list[Tensor | None],
) -> None:
    moments = zip(params, exp_avgs, exp_avg_sqs, noises, strict=True)
    for i, (p, m, v, noise) in enumerate(moments):
        wide_p, update = _update(p, m, v, rule)
        moved = wide_p + factors[i] * update
        p.copy_(moved if noise is None else _round_stochastically(moved, noise))


def _update(p: Tensor, m: Tensor, v: Tensor, rule: list[Tensor]) -> tuple[Tensor, Tensor]:
    _, _, eps, weight_decay = rule
    wide_p = p.to(m.dtype)
    return wide_p, m / (v.sqrt() + eps) + weight_decay * wide_p


def _noise_seed(seed: int, step: int, number: int, shard: Shard | None) -> int:
    """63 bits from (seed, step, parameter) and, where ranks hold different parts, the part."""
    part = [shard[0].get_local_rank(dim) for dim in shard[1]] if shard else []
    digest = hashlib.blake2b(repr((seed, step, number, part)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _noise(entry: _Entry) -> Tensor | None:
    """Uniform int32 in [0, 2^16), in the parameter's shape, for one rounding; None: nearest."""
    if entry.noise_seed is None:
        return None
    device = entry.param.device
    generator = torch.Generator(device).manual_seed(entry.noise_seed)
    shape = entry.param.shape
    return torch.randint(2**16, shape, generator=generator, dtype=torch.int32, device=device)


def _round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """float32 -> bfloat16 with the expectation of x: add noise below the 16 bits kept, cut them.

    A NaN stays as it is: the sum could carry its bits over into a zero."""
    bits = (x.view(torch.int32) + noise) & -(2**16)
    return torch.where(x.isnan(), x, bits.view(torch.float32)).to(torch.bfloat16)
