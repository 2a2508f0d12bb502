"""The image tower: any timm model as trunk, and a head into the embedding space."""

from collections import OrderedDict
from dataclasses import replace
from typing import ClassVar

import timm
import torch
from jaxtyping import Float, Int64, UInt8
from timm.layers import Mlp
from timm.models import group_parameters
from torch import Tensor, nn

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ImageTower as ImageConfig
from pennyclip.model.activation import activation_of, set_activation
from pennyclip.model.attention import attention_context
from pennyclip.model.cut import cut
from pennyclip.model.masking import install_selection, selecting
from pennyclip.model.weight_dtype import weight_dtype


class ImageTower(nn.Module):
    """Images to embeddings; `forward` is `project` of `features`.

    Names follow open_clip's `TimmModel`: `trunk.*` is timm's, `head.*` is ours.
    """

    head_names: ClassVar[tuple[str, ...]] = ("head.",)
    """How the names of the head's parameters begin; all others are the trunk's."""
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
        options = {"global_pool": config.pool} if config.pool else {}
        try:
            self.trunk = timm.create_model(config.name, num_classes=0, **resize, **options)
        except TypeError:  # a convolutional network: fits every size
            self.trunk = timm.create_model(config.name, num_classes=0, **options)
        if config.activation is not None:
            set_activation(self.trunk, config.activation)
        self.selection = install_selection(self.trunk)
        # Convolutions run about twice as fast with the channels last (measured on CPUs; NVIDIA's
        # guide says the same of its 16-bit kernels).
        convolutional = self.selection is None
        self.memory_format = torch.channels_last if convolutional else torch.contiguous_format
        self.trunk.to(memory_format=self.memory_format)
        self.image_size = config.image_size
        mean = config.mean or tuple(self.trunk.pretrained_cfg["mean"])
        std = config.std or tuple(self.trunk.pretrained_cfg["std"])
        self.config = replace(config, mean=mean, std=std, activation=activation_of(self.trunk))
        # Of the uint8 values, so that one subtraction and one division normalise a batch.
        self.register_buffer("mean", 255 * torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(3, 1, 1), persistent=False)
        width = self.trunk.num_features
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if config.head == "linear":
            layers["proj"] = nn.Linear(width, embed_dim, bias=config.head_bias)
        elif config.head == "mlp":
            layers["mlp"] = Mlp(width, 2 * embed_dim, embed_dim, bias=(True, config.head_bias))
        elif width != embed_dim:
            raise RequestError(
                f"model.image.head = none: '{config.name}' has {width} features, and "
                f"model.embed_dim is {embed_dim}. Make them equal, or choose a linear head."
            )
        self.head = nn.Sequential(layers)

    def check_image_size(self, size: int) -> None:
        """
        Raises:
            RequestError: the trunk cannot take images of this size.
        """
        movable = hasattr(self.trunk, "set_input_size") or not hasattr(self.trunk, "patch_embed")
        if size != self.image_size and not movable:
            raise RequestError(
                f"image_size = {size}: '{self.config.name}' is built for {self.image_size} pixels "
                "and cannot change. Leave the stage's image_size out."
            )
        embed = getattr(self.trunk, "patch_embed", None)
        patch = getattr(embed, "patch_size", (1, 1))[0]
        if size % patch:
            raise RequestError(
                f"image_size = {size} is no multiple of the {patch} pixel patches of "
                f"'{self.config.name}'. Take {-(-size // patch) * patch}."
            )

    def set_image_size(self, size: int) -> None:
        """Take images of another size from now on; position embeddings are resampled (timm's way:
        bicubic with antialiasing)."""
        if size == self.image_size:
            return
        if hasattr(self.trunk, "set_input_size"):
            self.trunk.set_input_size(img_size=(size, size))
        self.image_size = size
        self.config = replace(self.config, image_size=size)

    def normalize(self, images: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B 3 H W"]:
        normal = (images - self.mean) / self.std
        return normal.contiguous(memory_format=self.memory_format)

    def patches(self) -> int:
        """Patches of an image, from which `masking.keep_indices` chooses.

        Raises:
            RequestError: the trunk has no patch tokens that could be left out.
        """
        if self.selection is None:
            raise RequestError(
                f"'{self.config.name}' cannot be masked: its layers ({type(self.trunk).__name__}) "
                "need the whole grid of the image, not a sequence of independent patches. Set the "
                "mask ratio to 0, or take a ViT or an EVA as image tower."
            )
        return self.trunk.patch_embed.num_patches

    def features(
        self, images: UInt8[Tensor, "B 3 H W"], keep: Int64[Tensor, "B K"] | None = None
    ) -> Float[Tensor, "B W"]:
        """The trunk's pooled output.

        Args:
            images: one batch.
            keep: patches that each image keeps (`masking.keep_indices`), in training only; unset:
                all of them.
        """
        if keep is not None:
            assert self.training, "images are never masked in evaluation"
            assert self.selection is not None, "patches() has refused this tower"
        dtype = weight_dtype(self.trunk)
        with selecting(self.selection, keep), attention_context(images, dtype):
            return self.trunk(self.normalize(images).to(dtype))

    @property
    def enterable(self) -> bool:
        """Whether `prefix` and `suffix` exist for this trunk."""
        return cut(self.trunk) is not None

    def prefix(self, images: UInt8[Tensor, "B 3 H W"], layers: int) -> Float[Tensor, "B ..."]:
        """The state behind the first of `layers()`: tokens [B, L, W] or a map [B, C, h, w]."""
        parts = cut(self.trunk)
        assert parts is not None, "enterable has said no"
        dtype = weight_dtype(self.trunk)
        with attention_context(images, dtype):
            x = parts.before(self.normalize(images).to(dtype))
            for block in parts.blocks[: layers - 1]:
                x = block(x)
        return x

    def suffix(self, state: Float[Tensor, "B ..."], layers: int) -> Float[Tensor, "B W"]:
        """`features`, from what `prefix` made of the same images."""
        parts = cut(self.trunk)
        assert parts is not None, "enterable has said no"
        dtype = weight_dtype(self.trunk)
        x = state.to(dtype)
        if x.ndim == 4:
            x = x.contiguous(memory_format=self.memory_format)
        with attention_context(x, dtype):
            for block in parts.blocks[layers - 1 :]:
                x = block(x)
            return parts.after(x)

    def project(self, features: Float[Tensor, "B W"]) -> Float[Tensor, "B D"]:
        return self.head(features.to(weight_dtype(self.head)))

    def forward(
        self, images: UInt8[Tensor, "B 3 H W"], keep: Int64[Tensor, "B K"] | None = None
    ) -> Float[Tensor, "B D"]:
        return self.project(self.features(images, keep))

    def layers(self) -> list[list[str]]:
        """Names of the trunk's parameters by layer, the input first.

        timm's groups, except that norms behind the last block belong to that block: they are not
        a layer that one would unfreeze alone.
        """
        groups = group_parameters(self.trunk, self.trunk.group_matcher(coarse=False))
        layers = [[f"trunk.{name}" for name in groups[i]] for i in sorted(groups)]
        if all(self.get_parameter(name).ndim == 1 for name in layers[-1]):
            norms = layers.pop()
            layers[-1] += norms
        return layers
