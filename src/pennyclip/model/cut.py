"""Image trunks cut at their blocks, so that what frozen blocks compute can be stored.

timm runs a trunk as one piece. Here the same modules run in the same order in three parts: the
tests compare them with the whole, bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from timm.models.efficientnet import EfficientNet
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Parts:
    """`after` of all `blocks` of `before` of normalised images is the trunk's output."""

    before: Part
    """The first of the trunk's layers."""
    blocks: list[Part]
    """One layer each; what comes after belongs to the last, or is a layer of its own."""
    after: Part


def cut(trunk: nn.Module) -> Parts | None:
    """The parts of a trunk; None where it is of a kind that is not known to consist of such."""
    # Subclasses that compute something else are another kind.
    forward = getattr(type(trunk), "forward_features", None)
    if isinstance(trunk, VisionTransformer) and forward is VisionTransformer.forward_features:
        return Parts(
            before=lambda images: trunk.norm_pre(
                trunk.patch_drop(trunk._pos_embed(trunk.patch_embed(images)))
            ),
            blocks=list(trunk.blocks),
            after=lambda x: trunk.forward_head(trunk.norm(x)),
        )
    if isinstance(trunk, Eva) and forward is Eva.forward_features:
        rope = None
        if trunk.rope is not None:
            # Mixed embeddings learn, and every block depends on them.
            if trunk.rope_mixed or not hasattr(trunk.rope, "feat_shape"):
                return None
            rope = trunk.rope.get_embed()
        return Parts(
            before=lambda images: trunk.norm_pre(trunk._pos_embed(trunk.patch_embed(images))[0]),
            blocks=[partial(block, rope=rope) for block in trunk.blocks],
            after=lambda x: trunk.forward_head(trunk.norm(x)),
        )
    if isinstance(trunk, EfficientNet) and forward is EfficientNet.forward_features:
        return Parts(
            before=lambda images: trunk.bn1(trunk.conv_stem(images)),
            blocks=[block for stage in trunk.blocks for block in stage],
            after=lambda x: trunk.forward_head(trunk.bn2(trunk.conv_head(x))),
        )
    return None
