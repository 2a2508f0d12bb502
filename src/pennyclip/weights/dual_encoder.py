"""transformers' dual encoders: a pooling layer stands between an encoder and its projection.

ViT's and BERT's pooler is act(W x + b) of the first token's state x. No tower here has one, but a
pooler that passes x on (W = c times the identity, b = 0, act linear in that range) is a factor of
the projection. Exports are written so, and read so.
"""

from typing import Any

import torch
from torch import Tensor

LINEAR = 2.0**-16
"""tanh(x) = x to 1 part in 10^8 for states up to 10 times this; a power of two rounds nothing.
Chosen: small enough for that, and what the projection makes good for (65,536) fits float16."""
PROJECTIONS = {"vision_model": "visual_projection.weight", "text_model": "text_projection.weight"}


def fold_poolers(
    state: dict[str, Tensor], config: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Take poolers that pass their input on into the projections.

    Args:
        state: of a weights file.
        config: the config.json beside it.

    Returns:
        The tensors without those poolers, and for each key taken out the reason. A pooler that
        does more stays, and no tower will have a place for it.
    """
    if config.get("model_type") != "vision-text-dual-encoder":
        return state, {}
    state, folded = dict(state), dict[str, str]()
    for part, projection in PROJECTIONS.items():
        names = [f"{part}.pooler.dense.{kind}" for kind in ("weight", "bias")]
        if projection not in state or any(name not in state for name in names):
            continue
        weight, bias = (state[name] for name in names)
        factor, identity = weight[0, 0], torch.eye(len(weight), dtype=weight.dtype)
        act = config.get("vision_config", {}).get("pooler_act")
        linear = (part == "vision_model" and act == "linear") or 0 < factor <= LINEAR
        if linear and not bias.any() and torch.equal(weight, factor * identity):
            state[projection] = factor * state[projection]
            for name in names:
                del state[name]
                folded[name] = "passes the first token on; its factor went into the projection"
    return state, folded
