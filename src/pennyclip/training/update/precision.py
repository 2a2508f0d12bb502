"""What runs in which dtype.

The towers run in the chosen precision. The loss, and with it the temperature, runs in float32.
Norms take their statistics and attention its softmax in float32 under all of them: torch's kernels
and autocast's own rules see to it, and `model.attention` where they do not.

bf16 and fp16 are torch's autocast. Under the pure ones the weights themselves have 16 bits while
gradients are computed: see `narrow.py`. Single modules can have a precision of their own.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pennyclip.base.errors import RequestError, some_like
from pennyclip.config.keys import Config, ModulePrecision, Precision

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
PURE = {"pure-bf16": torch.bfloat16, "pure-fp16": torch.float16}
OWN = {"fp32": torch.float32, **AUTOCAST}
"""What a single module can compute in."""
LARGE = 2_000_000_000
"""Parameters above which `auto` takes bf16 whatever the hardware (requirement C1)."""
AMPERE = (8, 0)  # compute capability of the first NVIDIA GPUs with bf16 and TF32


@dataclass(frozen=True)
class Choice:
    """A precision, and why it was taken."""

    precision: Precision
    """Never `auto`."""
    reason: str


def choose(asked: Precision, device: torch.device, parameters: int) -> Choice:
    """What to run in: what was asked for, or for `auto` what fits the hardware and the model.

    Args:
        asked: the recipe's `precision`.
        device: where the model runs.
        parameters: of the whole model.

    Raises:
        RequestError: tf32, and the device has none.
    """
    fast = has_bf16(device)
    where = f"this {device.type.upper()}"
    if asked == "tf32" and (device.type != "cuda" or not fast):
        raise RequestError(
            f"precision = tf32: it exists on NVIDIA GPUs of compute capability 8.0 or more, and "
            f"the run is on {where}. Take fp32, or auto."
        )
    if asked != "auto":
        emulated = (asked.endswith("bf16") and not fast) or (
            asked.endswith("fp16") and device.type == "cpu"
        )
        note = f"; {where} emulates it, slower than fp32" if emulated else ""
        return Choice(asked, f"as asked{note}")
    if fast:
        return Choice("bf16", f"{where} computes in bf16, which needs no loss scaling")
    if parameters > LARGE:
        size = f"{parameters / 1e9:.1f} B parameters"
        return Choice("bf16", f"{size} need bf16's range, though {where} only emulates it")
    if device.type == "cuda":
        return Choice("fp16", f"{where} has no bf16; the loss is scaled")
    return Choice("fp32", f"{where} computes neither in bf16 nor in fp16")


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16, as against emulating it."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= AMPERE
    # Named alike in every torch from 2.9 on; its public `get_capabilities` is younger.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context in which the towers run; the loss runs outside of it, in float32."""
    assert precision != "auto", "choose() has settled it"
    if precision in AUTOCAST:
        return torch.autocast(device.type, dtype=AUTOCAST[precision])
    return nullcontext()


def check_precision(model: nn.Module, config: Config) -> None:
    """Refuse what a recipe says of precision and could not be done, or would have no effect.

    Raises:
        RequestError: `precision_of` names no module; `lr_scale` or `stochastic_rounding` stand
            beside a precision to which they don't belong.
    """
    _own_dtypes(model, config.precision_of)
    scale = config.optim.lr_scale
    if not 0 < scale < float("inf"):
        raise RequestError(f"optim.lr_scale = {scale}: expected a finite number above 0")
    if scale != 1 and config.precision in ("fp32", "tf32"):
        raise RequestError(
            f"optim.lr_scale = {scale:g} would have no effect: it belongs to the 16-bit "
            f"precisions, and precision = {config.precision}. Leave it out, and set optim.lr."
        )
    if config.optim.stochastic_rounding and config.precision != "pure-bf16":
        raise RequestError(
            "optim.stochastic_rounding would have no effect: it belongs to precision = pure-bf16, "
            f"and the run's is {config.precision}, which has float32 weights. Leave it out."
        )


def lr_scale(config: Config, precision: Precision) -> float:
    """What multiplies every rate of a run in `precision`."""
    return config.optim.lr_scale if precision in AUTOCAST or precision in PURE else 1.0


def assign(model: nn.Module, precision: Precision, choices: Sequence[ModulePrecision]) -> None:
    """Let modules compute gradients in a precision of their own from now on.

    Inside such a module, and all that is in it, autocast is off (fp32) or casts to its dtype, and
    what it is given is cast on entry. Where the modules behind it need the run's own dtype (all
    precisions but autocast's), its result is cast back. A pure precision leaves its weights be.

    Args:
        model: its modules are changed, not its weights or their names.
        precision: the run's, not `auto`.
        choices: patterns of module names; the first that matches a module, or what it is part of,
            counts.

    Raises:
        RequestError: a pattern matches no module that is still left. Near names are given.
    """
    own = _own_dtypes(model, choices)
    back = PURE.get(precision, None if precision in AUTOCAST else torch.float32)
    for name, module in model.named_modules():
        if name in own:
            # A tower's edge is no edge: its `project` and the loss take every dtype.
            edge = "." in name and own.get(name.rpartition(".")[0]) != own[name]
            _give(module, own[name], back, edge)


_computing = False  # not of a context: checkpointed activations are made again in other threads


@contextmanager
def own_precisions() -> Iterator[None]:
    """Where updates compute gradients; elsewhere what `assign` has said is not in force."""
    global _computing
    before, _computing = _computing, True
    try:
        yield
    finally:
        _computing = before


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """What `assign` gave a module; None: it computes in the run's precision."""
    return getattr(module, "pennyclip_dtype", None)


def _own_dtypes(model: nn.Module, choices: Sequence[ModulePrecision]) -> dict[str, torch.dtype]:
    """By the name of each module that has one."""
    own: dict[str, torch.dtype] = {}
    names = [name for name, _ in model.named_modules() if name]
    for choice in choices:
        left = [name for name in names if name not in own]
        found = [n for n in left if any(fnmatchcase(part, choice.modules) for part in _parts(n))]
        if not found:
            raise RequestError(
                f"precision_of: no module is left that matches '{choice.modules}'. Modules are "
                f"called {some_like(choice.modules, names)} and so on"
            )
        own |= dict.fromkeys(found, OWN[choice.precision])
    return own


def _parts(name: str) -> list[str]:
    """A module's name, and those of the modules that it is part of."""
    words = name.split(".")
    return [".".join(words[: i + 1]) for i in range(len(words))]


def _give(module: nn.Module, dtype: torch.dtype, back: torch.dtype | None, edge: bool) -> None:
    """Change a module's class: unlike a method of its own, that survives a copy of the model."""
    kind = type(module)
    methods = [
        name
        for name in ("forward", "features", "suffix", "project")
        if callable(getattr(kind, name, 0))
    ]
    changed = {name: _in_dtype(getattr(kind, name), dtype, back, edge) for name in methods}
    module.__class__ = type(kind.__name__, (kind,), {**changed, "pennyclip_dtype": dtype})


def _in_dtype(
    method: Callable[..., Any], dtype: torch.dtype, back: torch.dtype | None, edge: bool
) -> Callable[..., Any]:
    """A method that computes in `dtype`, and gives `back` what came to it in another one.

    Args:
        edge: what surrounds the module has another dtype; decides where the method is given no
            floating-point numbers.
    """

    autocasts = dtype != torch.float32 and back not in PURE.values()
    options: dict[str, Any] = {"dtype": dtype} if autocasts else {"enabled": False}

    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _computing:
            return method(self, *args, **kwargs)
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        dtypes = {x.dtype for x in given if x.is_floating_point()}
        args, kwargs = _cast((args, kwargs), dtype)
        with torch.autocast(given[0].device.type if given else "cpu", **options):
            result = method(self, *args, **kwargs)
        crossed = dtypes != {dtype} if dtypes else edge
        return _cast(result, back) if crossed and back is not None else result

    return run


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor of a structure in another dtype."""

    def one(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return pytree.tree_map(one, tree)


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Inside, products of float32 matrices and float32 convolutions are exact, or rounded to TF32.

    TF32 keeps 10 bits of the mantissa: for the towers, but never for the logits, where at a scale
    of 100 that is an error of 0.05. (torch rounds convolutions to TF32 unless told not to.)
    """
    matrices, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matrices)
        torch.backends.cudnn.allow_tf32 = convolutions
