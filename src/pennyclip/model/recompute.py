"""Activation checkpointing: blocks whose activations are computed again in the backward pass.

Chen et al. 2016 (arXiv 1604.06174), in torch's non-reentrant form, which draws the same dropout
again. Gradients are the same; a block's inner activations are not kept meanwhile, for about a third
more time in what is checkpointed.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ActivationCheckpointing
from pennyclip.model.attention import same_attention
from pennyclip.model.clip import CLIP, TextTower
from pennyclip.model.text_clip import ClipTextTower


def recompute(model: CLIP, config: ActivationCheckpointing) -> None:
    """Have the first blocks of each trunk recomputed, in place. Names of parameters don't change.

    Raises:
        RequestError: a trunk has fewer blocks, or none that are known.
    """
    for name, trunk, blocks, depth in (
        ("image", model.visual.trunk, image_blocks(model.visual.trunk), config.image),
        ("text", model.text.transformer, text_blocks(model.text), config.text),
    ):
        if depth != "none" and not blocks:
            raise RequestError(
                f"activation_checkpointing.{name}: the {type(trunk).__name__} trunk "
                "has no blocks that are known. Set it to none."
            )
        count = len(blocks) if depth == "all" else 0 if depth == "none" else depth
        if not 0 <= count <= len(blocks):
            raise RequestError(
                f"activation_checkpointing.{name} = {depth}: this tower has {len(blocks)} blocks. "
                f"Take 0 to {len(blocks)}, all, or none."
            )
        for block in blocks[:count]:
            # In place of a wrapping module, which would change the names of the parameters.
            block.forward = partial(_recomputed, block.forward)


def image_blocks(trunk: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a timm trunk, the input first; of an unknown kind: none."""
    stages = getattr(trunk, "blocks", None) or getattr(trunk, "stages", None) or []
    blocks: list[nn.Module] = []
    for stage in stages:
        inner = getattr(stage, "blocks", stage)
        blocks += list(inner) if isinstance(inner, nn.Sequential | nn.ModuleList) else [stage]
    return blocks


def text_blocks(tower: TextTower) -> list[nn.Module]:
    """The repeated blocks of a text trunk, the input first."""
    if isinstance(tower, ClipTextTower):
        return list(tower.transformer.resblocks)
    lists = (list(m) for m in tower.transformer.modules() if isinstance(m, nn.ModuleList))
    return max(lists, key=len, default=[])


def _recomputed(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    if torch.compiler.is_compiling():  # what is compiled takes the context along
        return checkpoint(forward, *inputs, use_reentrant=False, **named)
    # torch restores autocast when it calls again, and no other context.
    again = same_attention()
    return checkpoint(
        forward, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **named
    )
