"""Inputs by which an export is compared with the model that it was made from."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from pennyclip.data.text import Tokenizer, pad, truncate
from pennyclip.model.clip import CLIP

TOLERANCE = 1e-4
"""Of a coordinate of a unit vector. Chosen: some times what other orders of summation cost."""
TEXTS = ("a photo of a cat", "!", "two dogs, running over a wet meadow")


def pictures(model: CLIP, count: int = 3) -> UInt8[Tensor, "B 3 S S"]:
    """Noise, the same each time."""
    size, generator = model.visual.image_size, torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)


def captions(tokenizer: Tokenizer, count: int = 3) -> tuple[Int64[Tensor, "B L"], Tensor]:
    """Token ids of captions of different lengths, and the lengths [B]."""
    ids = [truncate(tokenizer.encode(text), tokenizer.context_length) for text in TEXTS[:count]]
    tokens, lengths = pad(ids, limit=tokenizer.context_length)
    return torch.from_numpy(tokens), torch.from_numpy(lengths)


def deviation(ours: Float[Tensor, "B D"], theirs: Float[Tensor, "B D"]) -> float:
    """The largest difference of a coordinate, both brought to unit norm; nan counts as such."""
    return float((F.normalize(ours.float()) - F.normalize(theirs.float())).abs().max())
