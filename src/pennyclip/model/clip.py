"""Two towers and a temperature."""

import math
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from pennyclip.config import ClipText, Model
from pennyclip.model.image import ImageTower
from pennyclip.model.text_clip import ClipTextTower
from pennyclip.model.text_transformers import TransformersTextTower

TextTower: TypeAlias = ClipTextTower | TransformersTextTower

INITIAL_LOGIT_SCALE = math.log(1 / 0.07)  # Radford et al. 2021, section 2.5, after Wu et al. 2018


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
        self.visual = ImageTower(config.image, config.embed_dim)
        # With the input statistics resolved: they travel with the model.
        self.config = replace(config, image=self.visual.config)
        self.text: TextTower
        if isinstance(config.text, ClipText):
            self.text = ClipTextTower(config.text, config.embed_dim)
        else:
            assert text_folder is not None, "a transformers tower is built from a folder"
            self.text = TransformersTextTower(config.text, config.embed_dim, text_folder)
        self.logit_scale = nn.Parameter(torch.tensor(INITIAL_LOGIT_SCALE))
