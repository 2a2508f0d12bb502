"""Two towers and a temperature."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from pennyclip.config.keys import ClipText, Model
from pennyclip.model.image import ImageTower
from pennyclip.model.text_clip import ClipTextTower
from pennyclip.model.text_transformers import TransformersTextTower

TextTower: TypeAlias = ClipTextTower | TransformersTextTower


class CLIP(nn.Module):
    """An image tower and a text tower with one embedding space.

    `logit_scale` is the natural logarithm of the factor between cosines and logits. It stays in
    float32, and the loss alone applies it.
    """

    def __init__(self, config: Model, text_folder: Path | None = None) -> None:
        """Build the model with random weights.

        Args:
            config: what to build.
            text_folder: where a transformers text tower's config.json lies.
        """
        super().__init__()
        self._config = config
        self.visual = ImageTower(config.image, config.embed_dim)
        self.text: TextTower
        if isinstance(config.text, ClipText):
            self.text = ClipTextTower(config.text, config.embed_dim)
        else:
            assert text_folder is not None, "a transformers tower is built from a folder"
            self.text = TransformersTextTower(config.text, config.embed_dim, text_folder)
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.logit_bias = nn.Parameter(torch.zeros(())) if config.logit_bias else None
        self.start_logits(1 / 0.07, 0.0)  # Radford et al. 2021, section 2.5, after Wu et al. 2018

    @property
    def config(self) -> Model:
        """What would build this model again, with all that was left open filled in."""
        return replace(self._config, image=self.visual.config)

    def set_head_dropout(self, share: float) -> None:
        """Drop another share of the trunks' features before the heads from now on."""
        self._config = replace(self._config, head_dropout=share)

    @torch.no_grad()
    def start_logits(self, scale: float, bias: float) -> None:
        """Set the factor between cosines and logits, and the bias where the model has one."""
        self.logit_scale.fill_(math.log(scale))
        if self.logit_bias is not None:
            self.logit_bias.fill_(bias)
