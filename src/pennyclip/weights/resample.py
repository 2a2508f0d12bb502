"""Another image size, patch size or caption length for weights that were trained at one.

Two manners for images. They differ most where the grid shrinks, and a little where it grows, for
torch's antialiasing bicubic kernel has the coefficient -0.5 and its plain one -0.75:

    timm   positions: bicubic with antialiasing; patch kernels: FlexiViT's pseudo-inverse (Beyer et
           al. 2023, section 3.4), which keeps the product of kernel and resized patch
    eva    both: bicubic without antialiasing, as in github.com/baaivision/EVA

RoPE tables are functions of the grid: they are recomputed, never resampled.
"""

import math
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from torch import Tensor

Manner = Literal["timm", "eva"]


def image_positions(
    positions: Float[Tensor, "1 N W"], grid: tuple[int, int], prefix: int, manner: Manner
) -> tuple[Float[Tensor, "1 M W"], str]:
    """Position embeddings for another grid of patches.

    Args:
        positions: for the prefix tokens, then for a square grid.
        grid: rows and columns wanted.
        prefix: class and register tokens in front, which are kept as they are.

    Returns:
        The embeddings, and the method in words.

    Raises:
        ValueError: the positions behind the prefix are not a square grid.
    """
    count = positions.shape[1] - prefix
    side = math.isqrt(max(count, 0))
    if side * side != count or not count:
        raise ValueError(f"{count} positions behind {prefix} prefix tokens are not a square grid")
    antialias = manner == "timm"
    resampled = resample_abs_pos_embed(
        positions, list(grid), [side, side], prefix, interpolation="bicubic", antialias=antialias
    )
    how = "with" if antialias else "without"
    return resampled, (
        f"grid {side} x {side} to {grid[0]} x {grid[1]}, bicubic {how} antialiasing ({manner})"
    )


def patch_kernel(
    kernel: Float[Tensor, "W C P P"], size: tuple[int, int], manner: Manner
) -> tuple[Float[Tensor, "W C Q Q"], str]:
    """The patch embedding's kernel for another patch size, and the method in words."""
    sizes = f"patch {kernel.shape[-1]} to {size[-1]}"
    if manner == "timm":
        resampled = resample_patch_embed(
            kernel, list(size), interpolation="bicubic", antialias=True
        )
        return resampled, f"{sizes}, pseudo-inverse of the bicubic resize (FlexiViT; timm)"
    resampled = F.interpolate(kernel.float(), size, mode="bicubic").to(kernel.dtype)
    return resampled, f"{sizes}, bicubic without antialiasing (eva)"


def text_positions(
    positions: Float[Tensor, "N W"], length: int
) -> tuple[Float[Tensor, "L W"], str]:
    """Position embeddings for another caption length, and the method in words.

    Shorter: the first ones, for captions start at the first. Longer: linear interpolation, as
    open_clip does.
    """
    count = len(positions)
    if length <= count:
        return positions[:length], f"the first {length} of {count} positions"
    resampled = F.interpolate(positions.float().T[None], length, mode="linear")[0].T
    return resampled.to(positions.dtype), f"{count} to {length} positions, linear interpolation"
