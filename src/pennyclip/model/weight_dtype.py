"""In which dtype a module computes, by its weights."""

import torch
from torch import nn


def weight_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of the first kernel or matrix that a module applies: what its input must have.

    16 bits inside an update in a pure 16-bit precision; otherwise float32, whatever autocast does.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            return part.weight.dtype
    return torch.float32
