"""Attention in float32 where 16 bits only slow it down."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def attention_context(x: Tensor, weights: torch.dtype) -> AbstractContextManager[object]:
    """What a tower runs in, so that its attention takes the fast path for the device of `x`.

    On the CPU in 16 bits (`weights` are, or autocast is on), torch's fused attention in bfloat16
    runs its backward at half the speed of float32 (measured: 64 against 27 ms at [32, 12, 50, 64]
    on AVX-512 with bf16, torch 2.14), so it computes in float32 there, which is also the more
    exact. Elsewhere: nothing.
    """
    narrow = torch.is_autocast_enabled("cpu") or weights.itemsize == 2
    return _Float32Attention() if x.device.type == "cpu" and narrow else nullcontext()


def same_attention() -> AbstractContextManager[object]:
    """The context that `attention_context` has put around this call, for when it is made again."""
    return _Float32Attention() if _Float32Attention.entered else nullcontext()


class _Float32Attention(TorchFunctionMode):
    """Runs `scaled_dot_product_attention` in float32, whoever calls it (timm, transformers, we)."""

    entered = 0  # contexts that a tower is in at the moment

    def __enter__(self) -> "_Float32Attention":
        _Float32Attention.entered += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        _Float32Attention.entered -= 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        # Autocast may be off by now, in a module with a precision of its own.
        autocast = torch.is_autocast_enabled("cpu")
        narrow = torch.get_autocast_dtype("cpu") if autocast else args[0].dtype
        with torch.autocast("cpu", enabled=False):
            out = func(*map(_widen, args), **{key: _widen(item) for key, item in kwargs.items()})
        return out.to(narrow)


def _widen(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
