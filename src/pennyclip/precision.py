"""What runs in which dtype.

The towers run in the chosen precision. The loss, and with it the temperature, runs in float32.
Norms take their statistics and attention its softmax in float32 under all of them: torch's kernels
and autocast's own rules see to it, and `model.attention` where they do not.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from pennyclip.config import Precision
from pennyclip.errors import RequestError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
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
        emulated = (asked == "bf16" and not fast) or (asked == "fp16" and device.type == "cpu")
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
    if precision in DTYPES:
        return torch.autocast(device.type, dtype=DTYPES[precision])
    return nullcontext()


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
