"""The architecture that the keys and shapes of a vision transformer's file give away.

EVA's releases (arXiv 2211.07636, 2303.11331; github.com/baaivision/EVA) share most of their keys
and differ in the rest: inner norms, kind of MLP, fused or separate projections, RoPE. Naming the
difference says more than the keys that it leaves over.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from timm.models.eva import EvaBlockPostNorm
from torch import Tensor, nn

NOT_TOLD = "not told by the keys"
SEPARATE_TO_FUSE = "separate, fused on loading"
TEXT = r"text|transformer\.|token_embedding|positional_embedding|ln_final"
CLASSES = (1000, 21841, 21843)  # ImageNet-1k; ImageNet-22k as EVA and as Google count it
POST_NORM_WIDTH = 1792  # EVA-02-CLIP-E/14: the one published EVA with post-norm, and so wide
STRUCTURE = (
    "inner_attention_norm", "mlp_norm", "mlp", "qkv", "qkv_bias", "norm_order",
    "relative_positions", "rope", "class_token",
)  # fmt: skip
UNSEEN = ("norm_order", "rope")  # of the structure, what no missing or spare key would show


@dataclass(frozen=True)
class Architecture:
    """One fact a field, in words."""

    inner_attention_norm: str
    mlp_norm: str
    mlp: str
    qkv: str
    qkv_bias: str
    norm_order: str
    relative_positions: str
    rope: str
    patch: str
    grid: str
    class_token: str
    pooling: str
    head: str
    dtype: str

    def differences(self, tower: "Architecture", names: tuple[str, ...] = STRUCTURE) -> list[str]:
        """Where a tower is built otherwise than this file, one line each."""
        lines = []
        for name in names:
            mine, other = getattr(self, name), getattr(tower, name)
            if mine != other and not {mine, other} & {NOT_TOLD, SEPARATE_TO_FUSE}:
                lines.append(f"{name.replace('_', ' ')}: {mine} in the file, {other} in the tower")
        return lines

    def tree(self) -> dict[str, str]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class _Keys:
    """The tensors of the image tower, found by the end of their keys."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = {key: value for key, value in state.items() if not re.match(TEXT, key)}

    def find(self, *patterns: str) -> Tensor | None:
        for pattern in patterns:
            ending = re.compile(rf"(^|.*\.)({pattern})")
            for key, value in self.state.items():
                if ending.fullmatch(key):
                    return value
        return None

    def has(self, *patterns: str) -> bool:
        return self.find(*patterns) is not None


def describe(
    state: Mapping[str, Tensor], trunk: nn.Module | None = None, norm_order: str | None = None
) -> Architecture | None:
    """What the tensors of a vision transformer tell, whatever their layout.

    Args:
        state: of a file, or of a trunk.
        trunk: the module whose `state` it is, if any: it knows what keys do not tell.
        norm_order: what the file says otherwise about it, for no key does.

    Returns:
        None where there is no vision transformer in it.
    """
    keys = _Keys(state)
    patch = keys.find(r"patch_embed\.proj\.weight", r"conv1\.weight", r"patch_embedding\.weight")
    if patch is None or patch.ndim != 4 or not keys.has(r"(blocks|resblocks|layers)\.0\..+"):
        return None
    positions = keys.find("pos_embed", "positional_embedding", r"position_embedding\.weight")
    token = keys.has("cls_token", "class_embedding")
    mlp = _mlp(keys)
    return Architecture(
        inner_attention_norm=_word(keys.has(r"inner_attn_ln\.weight", r"attn\.norm\.weight")),
        mlp_norm=_word(keys.has(r"ffn_ln\.weight", r"mlp\.norm\.weight")),
        mlp=mlp,
        qkv=_qkv(keys),
        qkv_bias=_qkv_bias(keys),
        norm_order=norm_order or _norm_order(keys, mlp, patch.shape[0], trunk),
        relative_positions=_word(keys.has("relative_position_bias_table")),
        rope=_rope(keys, trunk),
        patch=str(patch.shape[-1]),
        grid=NOT_TOLD if positions is None else _grid(positions.shape[-2], token),
        class_token=_word(token),
        pooling=_pooling(keys, token, trunk),
        head=_head(keys),
        dtype=", ".join(sorted({str(v.dtype).split(".")[-1] for v in keys.state.values()})),
    )


def _word(yes: bool) -> str:
    return "yes" if yes else "no"


def _mlp(keys: _Keys) -> str:
    if keys.has(r"mlp\.w12\.weight"):
        return "SwiGLU, fused"
    if keys.has(r"mlp\.w1\.weight", r"mlp\.fc1_g\.weight"):
        return "SwiGLU, separate"
    first = keys.find(r"\d+\.mlp\.(fc1|c_fc)\.weight")
    second = keys.find(r"\d+\.mlp\.(fc2|c_proj)\.weight")
    if first is None or second is None:
        return NOT_TOLD
    return "SwiGLU, fused" if first.shape[0] == 2 * second.shape[1] else "plain"


def _qkv(keys: _Keys) -> str:
    if keys.has(r"self_attn\.q_proj\.weight"):  # transformers'
        return SEPARATE_TO_FUSE
    return "separate" if keys.has(r"attn\.q_proj\.weight") else "fused"


def _qkv_bias(keys: _Keys) -> str:
    if keys.has(r"attn\.(k_proj|qkv)\.bias", "in_proj_bias"):
        return "q, k and v"
    return "q and v" if keys.has(r"attn\.(q_bias|q_proj\.bias)") else "none"


def norm_order_of(trunk: nn.Module) -> Literal["pre", "post"]:
    """Whether the blocks of a trunk norm in front of attention and MLP, or behind."""
    post = any(isinstance(module, EvaBlockPostNorm) for module in trunk.modules())
    return "post" if post else "pre"


def _norm_order(keys: _Keys, mlp: str, width: int, trunk: nn.Module | None) -> str:
    if trunk is not None:
        return norm_order_of(trunk)
    if width == POST_NORM_WIDTH and mlp == "plain" and keys.has("q_bias"):
        return "post"
    clip = keys.has(r"resblocks\.0\..+", r"encoder\.layers\.0\..+")
    return "pre" if clip or mlp.startswith("SwiGLU") else NOT_TOLD


def _rope(keys: _Keys, trunk: nn.Module | None) -> str:
    """The grid on which the rotation angles were laid out; a finer grid divides the same angles."""
    if trunk is not None:
        rope = getattr(trunk, "rope", None)
        if rope is None:
            return "none"
        shape = getattr(rope, "ref_feat_shape", None) or getattr(rope, "feat_shape", None)
        return NOT_TOLD if shape is None else f"reference grid {shape[0]}"
    cos, sin = keys.find(r"rope\.freqs_cos"), keys.find(r"rope\.freqs_sin")
    if cos is None or sin is None or cos.is_meta:
        return NOT_TOLD  # timm's files leave the tables out
    # Row 1 is the second patch of the first row; the second half of the channels turns with the
    # column, its first channel by exactly (reference grid / grid) radians.
    channel = cos.shape[1] // 2
    angle = math.atan2(float(sin[1, channel]), float(cos[1, channel]))
    return f"reference grid {round(angle * math.isqrt(len(cos)))}"


def _grid(tokens: int, class_token: bool) -> str:
    count = tokens - class_token
    side = math.isqrt(count)
    return f"{side} x {side}" if side * side == count else f"{count} positions, not a square"


def _pooling(keys: _Keys, class_token: bool, trunk: nn.Module | None) -> str:
    if trunk is not None:
        return str(getattr(trunk, "global_pool", NOT_TOLD))
    if keys.has(r"fc_norm\.weight"):
        return "avg"
    if keys.has(r"attn_pool\..+", r"head\.probe"):
        return "map"
    return "token" if class_token and not keys.has("mask_token", r"lm_head\..+") else NOT_TOLD


def _head(keys: _Keys) -> str:
    if (codes := keys.find(r"lm_head\.weight")) is not None:
        return f"masked patches: {codes.shape[0]} outputs"
    if (own := keys.find(r"visual\.proj")) is not None:
        return f"embedding of {own.shape[1]}"
    head = keys.find(r"head\.proj\.weight", r"head\.weight", r"visual_projection\.weight")
    if head is None:
        return "none"
    count = head.shape[0]
    return f"classifier of {count} classes" if count in CLASSES else f"embedding of {count}"
