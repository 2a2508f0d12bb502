"""What a precision does to each module: one real batch, in float32 and in the chosen precision.

Of every module that computes, on the same weights, batch and random numbers:

- the dtype that its kernels were really given, below autocast and all casts;
- its error: that of its output, with all that came before in the chosen precision; and its own: of
  its output in the chosen precision from float32's input. Relative, in the Euclidean norm;
- the share of its output, and of its output's gradient (times the loss scale), that overflowed (is
  not finite) or underflowed (is 0, and is not in float32);
- the error of that gradient.

The batch is gone through twice, forward and backward: first in the chosen precision, then in
float32 while each module computes a second time, in the chosen precision, on float32's input.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pennyclip.base.errors import RequestError
from pennyclip.commands.bench.workbench import Workbench, open_workbench, stage_number
from pennyclip.config.keys import Config, LossScaling, Precision
from pennyclip.training.run import run_device
from pennyclip.training.update.narrow import narrowed
from pennyclip.training.update.precision import autocast, choose, own_precisions

KERNELS = (
    *("mm", "conv", "norm", "attention", "attn", "softmax", "embedding"),
    *("gelu", "relu", "silu", "sigmoid", "tanh", "hardswish"),
)
"""Parts of the names of the operations that make a module one that computes."""
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
"""Largest relative error of rounding a number to nearest."""
TOO_LARGE = 4.0
"""Times that: the own error beyond which a module is better kept in float32. Chosen: rounding
input, weights and output costs 0.7 (measured); at four, something cancels or adds up inside."""
TOO_SMALL = 0.01
"""The share of a gradient that may underflow. Chosen: those are its smallest numbers."""
SAMPLE = 2**16
"""Numbers of each tensor that are kept to be compared, evenly spread. Chosen: a norm to 1 %."""


@dataclass
class Module:
    """A module that computes, in one batch."""

    name: str
    dtype: str
    """What its kernels were given: fp32, bf16, fp16, or several of them."""
    error: float = 0.0
    own_error: float = 0.0
    own_overflow: float = 0.0
    """As its own error is; `overflow` may have come from before."""
    overflow: float = 0.0
    underflow: float = 0.0
    gradient_error: float | None = None
    """None: nothing before it learns."""
    gradient_overflow: float | None = None
    gradient_underflow: float | None = None

    @property
    def reason(self) -> str:
        """Why it is better kept in float32; empty: it is not."""
        rounding = max((ROUNDING.get(part, 0.0) for part in self.dtype.split(", ")), default=0.0)
        if self.dtype == "fp32":
            return ""
        if self.own_overflow:
            return f"{self.own_overflow:.1%} of its output overflow"
        if self.own_error > TOO_LARGE * rounding:
            return f"its own error is {self.own_error / rounding:.1f} times the rounding error"
        if (self.gradient_underflow or 0.0) > TOO_SMALL:
            return f"{self.gradient_underflow:.1%} of its gradient underflow"
        return ""


@dataclass(frozen=True)
class ModuleErrors:
    """What a precision does to each module of a model."""

    precision: str
    instead_of: str | None
    """What the recipe says, where it means fp32; None: `precision` is the recipe's."""
    loss_scale: float
    loss: float
    exact_loss: float
    """In float32."""
    modules: tuple[Module, ...]
    """In the order in which they compute."""

    @property
    def keep(self) -> dict[str, str]:
        """The modules that are better kept in float32, and why."""
        return {m.name: m.reason for m in self.modules if m.reason}

    def __str__(self) -> str:
        scale = f", loss scale {self.loss_scale:,.0f}" if self.loss_scale != 1 else ""
        width = max((len(m.name) for m in self.modules), default=6)
        lines = []
        if self.instead_of:
            lines = [
                f"Nothing would run in 16 bits here (precision = {self.instead_of}): shown is "
                f"{self.precision}. For another: --precision pure-bf16",
                "",
            ]
        lines += [
            f"{self.precision} against fp32 on one batch{scale}: loss {self.loss:.6f} against "
            f"{self.exact_loss:.6f}",
            "",
            f"{'':{width}}{'':>11}{'output':^37}{'its gradient':^28}",
            f"{'module':{width}}{'ran in':>11}{'error':>9}{'own':>9}{'over':>9}{'under':>9}"
            f"{'error':>10}{'over':>9}{'under':>9}",
        ]
        for m in self.modules:
            gradient = (m.gradient_error, m.gradient_overflow, m.gradient_underflow)
            cells = [m.error, m.own_error, m.overflow, m.underflow, *gradient]
            lines.append(f"{m.name:{width}}{m.dtype:>11}  {'  '.join(map(_cell, cells))}")
        lines += [
            "",
            f"Better kept in float32: where, on float32's input, the output overflows or the own "
            f"error is beyond {TOO_LARGE:g} times the dtype's rounding error; where more than "
            f"{TOO_SMALL:.0%} of the gradient underflow (a larger loss scale may do as well).",
        ]
        lines += [f"  {name}: {why}" for name, why in self.keep.items()] or ["  none"]
        if self.keep:
            lines += ["", "In the recipe:", ""]
            for name in self.keep:
                lines += ["[[precision_of]]", f'modules = "{name}"', 'precision = "fp32"']
        return "\n".join(lines)


def _cell(value: float | None) -> str:
    return f"{'':>7}" if value is None else f"{value:7.2%}" if value else f"{'0':>7}"


@dataclass(frozen=True)
class Call:
    """A module's forward pass."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor


class Seen:
    """What is kept of a call in the chosen precision."""

    def __init__(self, call: Call) -> None:
        self.given = [x.dtype for x in _floats((call.arguments, call.keywords))]
        """Dtypes of the floating-point tensors among its arguments."""
        self.output, self.overflow = _sample(call.output), _not_finite(call.output)
        self.gradient: Tensor | None = None
        self.gradient_overflow: float | None = None
        if call.output.requires_grad:
            call.output.register_hook(self._backward)  # type: ignore[no-untyped-call]

    def _backward(self, gradient: Tensor) -> None:
        self.gradient, self.gradient_overflow = _sample(gradient), _not_finite(gradient)


def measure_module_errors(config: Config, stage: int | None = None) -> ModuleErrors:
    """Compare each module with float32, at a run's start.

    Args:
        config: with its data and the precision to look at. Where nothing would run in 16 bits, that
            is what `auto` takes here, or bf16 where it takes fp32.
        stage: from 1; None: the last, in which usually most learns.

    Raises:
        RequestError: the recipe could not be trained as it stands, or runs in tf32.
    """
    number = stage_number(config, stage, -1)
    asked, taken = config.precision, _looked_at(config)
    config = replace(config, workers=0, precision=taken)
    config = replace(config, optim=replace(config.optim, stochastic_rounding=False))
    bench = open_workbench(config, number)
    plain = replace(
        config,
        precision="fp32",
        precision_of=(),
        loss_scaling=LossScaling(),
        optim=replace(config.optim, lr_scale=1.0),
    )
    exact = open_workbench(plain, number)
    seen: dict[str, Seen] = {}

    def see(name: str, call: Call) -> None:
        if name not in seen:
            seen[name] = Seen(call)

    with _watching(bench.model, see) as kernels:
        record = _pass(bench)
    # In the order in which they computed; others only call those.
    modules = {n: Module(n, ", ".join(sorted(kernels[n]))) for n in seen if n in kernels}
    left = dict(modules)
    scale = float(record.get("loss_scale", 1.0))

    def compare(name: str, call: Call) -> None:
        if module := left.pop(name, None):  # the first call, as in `see`
            _compare(module, seen[name], call, scale, bench)

    with narrowed(bench.model, bench.precision), _watching(exact.model, compare):
        reference = _pass(exact)
    return ModuleErrors(
        precision=bench.precision,
        instead_of=asked if asked != taken else None,
        loss_scale=scale,
        loss=float(record["loss"]),
        exact_loss=float(reference["loss"]),
        modules=tuple(modules.values()),
    )


def _looked_at(config: Config) -> Precision:
    """The recipe's precision, unless all would run in fp32: then one of 16 bits.

    Raises:
        RequestError: it is tf32, of which modules show nothing.
    """
    if any(choice.precision != "fp32" for choice in config.precision_of):
        return config.precision
    if config.precision == "tf32":
        raise RequestError(
            "precision = tf32: it rounds what goes into products, and every module's own numbers "
            "stay fp32's, so there is nothing to compare. Name another: --precision bf16"
        )
    auto = choose("auto", run_device(), 0).precision
    here = auto if config.precision == "auto" else config.precision
    if here != "fp32":
        return config.precision
    return auto if auto != "fp32" else "bf16"


def _pass(bench: Workbench) -> dict[str, Any]:
    """Forward and backward of the stage's first batch, at a rate of 0: nothing moves."""
    for group in bench.setup.optimizer.param_groups:
        group["lr"] = 0.0
    step = bench.plan.ends[bench.number - 1] if bench.number else 0
    batch = bench.setup.loader.batch(step)
    return bench.update(bench.setup, batch, step, bench.scaler)


def _compare(module: Module, seen: Seen, call: Call, scale: float, bench: Workbench) -> None:
    """Fill in what a module's float32 pass tells about the one in the chosen precision."""
    reference = _sample(call.output)
    module.overflow = seen.overflow
    module.error, module.underflow = _error(seen.output, reference), _zeros(seen.output, reference)
    dtypes = iter(seen.given)

    def as_given(x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().to(next(dtypes, x.dtype)) if floating else x

    arguments, keywords = pytree.tree_map(as_given, (call.arguments, call.keywords))
    again = bench.model.get_submodule(module.name)
    with (
        torch.no_grad(),
        torch.random.fork_rng(),
        own_precisions(),
        autocast(bench.precision, bench.device),
    ):
        own = _tensor(again(*arguments, **keywords))
    module.own_error, module.own_overflow = _error(_sample(own), reference), _not_finite(own)

    def backward(gradient: Tensor) -> None:
        if seen.gradient is not None:
            exact = scale * _sample(gradient)
            module.gradient_error = _error(seen.gradient, exact)
            module.gradient_overflow = seen.gradient_overflow
            module.gradient_underflow = _zeros(seen.gradient, exact)

    if call.output.requires_grad:
        call.output.register_hook(backward)  # type: ignore[no-untyped-call]


@contextmanager
def _watching(
    model: nn.Module, see: Callable[[str, Call], object]
) -> Iterator[dict[str, set[str]]]:
    """Tells of each module's forward pass that ends in a tensor.

    Yields:
        By module, the dtypes that its kernels were given: filled while modules run.
    """
    stack: list[str] = [""]
    kernels: dict[str, set[str]] = {}

    class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            name = func.overloadpacket.__name__
            if stack[-1] and any(part in name for part in KERNELS) and "backward" not in name:
                for x in _floats(args)[:1]:
                    kernels.setdefault(stack[-1], set()).add(NAMES[x.dtype])
            return func(*args, **(kwargs or {}))

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = stack.pop()
        tensor = _tensor(output)
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            see(name, Call(args, kwargs, tensor))

    handles = [
        handle
        for name, module in model.named_modules()
        if name
        for handle in (
            module.register_forward_pre_hook(enter(name)),
            module.register_forward_hook(leave, with_kwargs=True),
        )
    ]
    try:
        with Kernels():  # type: ignore[no-untyped-call]
            yield kernels
    finally:
        for handle in handles:
            handle.remove()


def _floats(tree: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _tensor(output: Any) -> Any:
    """A module's output, or the first of several."""
    return output[0] if isinstance(output, tuple) else output


def _sample(x: Tensor) -> Tensor:
    flat = x.detach().flatten()
    return flat[:: -(-flat.numel() // SAMPLE)].float()


def _not_finite(x: Tensor) -> float:
    return 1.0 - torch.isfinite(x).float().mean().item()


def _error(found: Tensor, exact: Tensor) -> float:
    """Relative, of what is finite in both."""
    both = torch.isfinite(found) & torch.isfinite(exact)
    norm = exact[both].norm().item()
    return (found[both] - exact[both]).norm().item() / norm if norm else 0.0


def _zeros(found: Tensor, exact: Tensor) -> float:
    """Share of what is not 0 in float32, and became 0."""
    there = exact != 0
    return (there & (found == 0)).sum().item() / max(1, there.sum().item())
