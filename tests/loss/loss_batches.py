"""Seeded batches of embeddings."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pennyclip.loss import Features


@dataclass
class Leaves:
    """What a loss is differentiated by."""

    image: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor

    def gradients(self) -> list[Tensor]:
        grads = [x.grad for x in (self.image, self.text, self.scale, self.bias)]
        return [g for g in grads if g is not None]


def leaves(
    n: int = 23, dim: int = 16, *, scale: float = 20.0, dtype: torch.dtype = torch.float64
) -> Leaves:
    """Unit vectors; texts lean towards their images, as in a model half trained."""
    generator = torch.Generator().manual_seed(n)
    image = F.normalize(torch.randn(n, dim, generator=generator, dtype=torch.float64), dim=1)
    noise = F.normalize(torch.randn(n, dim, generator=generator, dtype=torch.float64), dim=1)
    text = F.normalize(image + noise, dim=1)
    values = (image, text, torch.tensor(scale), torch.tensor(-5.0))
    return Leaves(*(x.to(dtype).requires_grad_() for x in values))


def pairs_of_three(n: int) -> Tensor:
    """Groups: most rows alone, every fifth one with two others far from it."""
    groups = torch.arange(n)
    groups[::5] %= 3
    return groups


def features(x: Leaves, groups: Tensor | None = None) -> Features:
    """One process: local and global are the same tensors."""
    n = len(x.image)
    return Features(
        image=x.image, text=x.text, all_image=x.image, all_text=x.text, offset=0,
        scale=x.scale, bias=x.bias, groups=torch.arange(n) if groups is None else groups,
    )  # fmt: skip


def ranks(x: Leaves, count: int, groups: Tensor) -> list[Features]:
    """As `count` ranks see the batch after a gather that lets gradients through."""
    n = len(x.image) // count
    return [
        Features(
            image=x.image[i : i + n], text=x.text[i : i + n], all_image=x.image, all_text=x.text,
            offset=i, scale=x.scale, bias=x.bias, groups=groups,
        )
        for i in range(0, n * count, n)
    ]  # fmt: skip
