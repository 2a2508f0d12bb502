"""Which timm trunks are, parameter for parameter, a vision transformer that others build too."""

from dataclasses import dataclass

from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from pennyclip.config.keys import Activation
from pennyclip.model.activation import activation_of
from pennyclip.model.image import ImageTower

SHOWN = 4  # keys that a reason names. chosen: one line
BLOCK = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")


class Unlike(Exception):
    """Why a tower cannot be written as the wanted architecture, as the end of a sentence."""


@dataclass(frozen=True)
class ViT:
    """The sizes of a vision transformer with a class token that is pooled."""

    width: int
    layers: int
    heads: int
    hidden: int
    """Width inside the MLPs."""
    patch: int
    """Side of a patch, in pixels."""
    image_size: int
    eps: float
    """Of all layer norms."""
    activation: Activation


def as_vit(tower: ImageTower, *, clip: bool) -> ViT:
    """The sizes of a tower that is a plain ViT and a linear head without bias.

    Args:
        tower: any image tower.
        clip: CLIP's ViT (a norm in front of the blocks, patches without bias: Radford et al.
            2021, section 2.4); otherwise the first one (Dosovitskiy et al. 2021).

    Raises:
        Unlike: it is something else.
    """
    kind, trunk, config = "CLIP's ViT" if clip else "a plain ViT", tower.trunk, tower.config
    if not isinstance(trunk, VisionTransformer) or any(type(b) is not Block for b in trunk.blocks):
        raise Unlike(f"'{config.name}' ({type(trunk).__name__}) is not {kind}")
    parts = ["cls_token", "pos_embed", "patch_embed.proj.weight", "norm.weight", "norm.bias"]
    parts += ["norm_pre.weight", "norm_pre.bias"] if clip else ["patch_embed.proj.bias"]
    for i in range(len(trunk.blocks)):
        parts += [f"blocks.{i}.{name}.{end}" for name in BLOCK for end in ("weight", "bias")]
    if odd := set(parts) ^ set(trunk.state_dict()):
        names = ", ".join(sorted(odd)[:SHOWN]) + (", ..." if len(odd) > SHOWN else "")
        raise Unlike(f"'{config.name}' differs from {kind} in {names}")
    if trunk.global_pool != "token":
        raise Unlike(f"'{config.name}' pools by '{trunk.global_pool}', {kind} takes its token")
    side = config.image_size // trunk.patch_embed.patch_size[0]
    if trunk.pos_embed.shape[1] != side * side + 1:
        raise Unlike(f"'{config.name}' has other positions than the class token's and the patches'")
    eps = {module.eps for module in trunk.modules() if isinstance(module, nn.LayerNorm)}
    activation = activation_of(trunk)
    if len(eps) != 1 or activation is None:
        raise Unlike(f"'{config.name}' has other norms or MLPs than {kind}")
    if config.head != "linear" or config.head_bias:
        head = "a linear one with bias" if config.head == "linear" else f"'{config.head}'"
        raise Unlike(f"its head is {head}, and only a linear one without bias can be written")
    block = trunk.blocks[0]
    return ViT(
        width=trunk.embed_dim,
        layers=len(trunk.blocks),
        heads=block.attn.num_heads,
        hidden=block.mlp.fc1.out_features,
        patch=trunk.patch_embed.patch_size[0],
        image_size=config.image_size,
        eps=eps.pop(),
        activation=activation,
    )
