"""Stochastic rounding to bfloat16: up or down, with the probability that keeps the mean.

Rounding to nearest loses every update below 1/512 of a weight; this one loses none on average
(Gupta et al. 2015, arXiv 1502.02551, section 3).
"""

import torch
from jaxtyping import Float32, Int32
from torch import Tensor

NOISE = 2**16  # bfloat16 is the upper half of float32's bits: this many steps lie between two


def stochastic(x: Float32[Tensor, "..."], noise: Int32[Tensor, "..."]) -> Float32[Tensor, "..."]:
    """Values that bfloat16 has, in float32, with the expectation of `x`.

    Args:
        x: values to round. What bfloat16 has stays, and so do infinities and NaN.
        noise: uniform in [0, NOISE), shaped as `x`: it is added below the 16 bits that are kept,
            and the sum is cut.
    """
    bits = (x.view(torch.int32) + noise) & -NOISE
    # A NaN's sum could carry over into a zero.
    return torch.where(x.isnan(), x, bits.view(torch.float32))
