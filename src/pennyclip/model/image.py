"""The image tower: any timm model as trunk, and a head into the embedding space."""

from collections import OrderedDict
from dataclasses import replace

import timm
import torch
from jaxtyping import Float, UInt8
from timm.layers import Mlp
from timm.models import group_parameters
from torch import Tensor, nn

from pennyclip.config import ImageTower as ImageConfig
from pennyclip.errors import RequestError


class ImageTower(nn.Module):
    """Images to embeddings; `forward` is `project` of `features`.

    Names follow open_clip's `TimmModel`: `trunk.*` is timm's, `head.*` is ours.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: ImageConfig, embed_dim: int) -> None:
        super().__init__()
        if not timm.is_model(config.name):
            near = timm.list_models(f"*{config.name.split('_')[0]}*")[:8]
            raise RequestError(
                f"model.image.name: timm {timm.__version__} has no model '{config.name}'. "
                f"Similar ones: {', '.join(near) or 'none'}. See: pennyclip list towers"
            )
        known = timm.get_pretrained_cfg(config.name.split(".")[0])
        default = known.input_size[-1] if known else config.image_size
        # Only models that tie parameters to the image's size take img_size.
        resize = {"img_size": config.image_size} if config.image_size != default else {}
        try:
            self.trunk = timm.create_model(config.name, num_classes=0, **resize)
        except TypeError:  # a convolutional network: fits every size
            self.trunk = timm.create_model(config.name, num_classes=0)
        self.image_size = config.image_size
        mean = config.mean or tuple(self.trunk.pretrained_cfg["mean"])
        std = config.std or tuple(self.trunk.pretrained_cfg["std"])
        self.config = replace(config, mean=mean, std=std)
        # Of the uint8 values, so that one subtraction and one division normalise a batch.
        self.register_buffer("mean", 255 * torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(3, 1, 1), persistent=False)
        width = self.trunk.num_features
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if config.head == "linear":
            layers["proj"] = nn.Linear(width, embed_dim, bias=False)
        else:
            layers["mlp"] = Mlp(width, 2 * embed_dim, embed_dim, bias=(True, False))
        self.head = nn.Sequential(layers)

    def normalize(self, images: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B 3 H W"]:
        return (images - self.mean) / self.std

    def features(self, images: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B W"]:
        """The trunk's pooled output."""
        return self.trunk(self.normalize(images))

    def project(self, features: Float[Tensor, "B W"]) -> Float[Tensor, "B D"]:
        return self.head(features)

    def forward(self, images: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B D"]:
        return self.project(self.features(images))

    def layers(self) -> list[list[str]]:
        """Names of the trunk's parameters by layer (timm's groups), the input first."""
        groups = group_parameters(self.trunk, self.trunk.group_matcher(coarse=False))
        return [[f"trunk.{name}" for name in groups[i]] for i in sorted(groups)]
