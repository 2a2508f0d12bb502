"""What runs in which dtype."""

from contextlib import AbstractContextManager, nullcontext

import torch

from pennyclip.config import Precision


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context in which the towers run; the loss runs outside of it, in float32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
