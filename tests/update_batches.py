"""A CLIP small enough to be updated a thousand times, and batches for it."""

from typing import Any, Literal

import torch
from torch import nn

from pennyclip.config.keys import ClipText, ImageTower, Model, Optim
from pennyclip.data.loader import Batch
from pennyclip.model.clip import CLIP
from pennyclip.optim import OPTIMIZERS
from pennyclip.optim.groups import parameter_groups

SIZE, WIDTH, LENGTH, VOCABULARY = 64, 32, 16, 100  # 64 pixels: 16 patches
TEXT = ClipText(width=WIDTH, heads=2, layers=2, context_length=LENGTH, vocab_size=VOCABULARY)


def tiny_clip(
    dropout: float = 0.0,
    image: str = "vit_tiny_patch16_224",
    head: Literal["linear", "none"] = "linear",
    bias: bool = False,
) -> CLIP:
    """Two blocks a tower, in training mode."""
    torch.manual_seed(0)
    tower = ImageTower(name=image, image_size=SIZE, head=head)
    embed_dim = 24 if head == "linear" else 192
    model = CLIP(Model(image=tower, text=TEXT, embed_dim=embed_dim, logit_bias=bias))
    if image.startswith("vit"):
        model.visual.trunk.blocks = model.visual.trunk.blocks[:2]
        for block in model.visual.trunk.blocks:
            block.mlp.drop2 = nn.Dropout(dropout)
    for block in model.text.transformer.resblocks:
        block.mlp.add_module("drop", nn.Dropout(dropout))
    return model.train()


def adamw(model: CLIP, lr: float = 1e-3) -> torch.optim.Optimizer:
    return OPTIMIZERS["adamw"](
        parameter_groups(model.named_parameters(), {}, Optim(lr=lr)), Optim(lr=lr)
    )


def pairs(count: int, seed: int = 0, **changed: Any) -> Batch:
    """Random pictures and captions, no two of a group."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (count,), generator=generator)
    fields = {
        "rows": torch.arange(count),
        "groups": torch.arange(count),
        "images": torch.randint(
            256, (count, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8
        ),
        "tokens": torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator),
        "lengths": lengths,
        "image_features": None,
        "text_features": None,
    }
    return Batch(**(fields | changed))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}
