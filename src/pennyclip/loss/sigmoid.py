"""The pairwise sigmoid loss: SigLIP.

Zhai et al. 2023 (arXiv 2303.15343), section 3.2 and algorithm 1.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from pennyclip.loss.features import Features
from pennyclip.loss.softmax import TIE
from pennyclip.loss.tiles import tiles, with_gradients

INITIAL_SCALE = 10.0  # Zhai et al. 2023, section 3.2: t' = log 10
INITIAL_BIAS = -10.0  # Zhai et al. 2023, section 3.2: most pairs do not match, at first as later
MAX_SCALE = math.inf  # the paper sets no bound


def sigmoid(features: Features) -> tuple[Float[Tensor, ""], dict[str, float | Tensor]]:
    """Sigmoid loss (SigLIP): each image and text match or not, whatever the others do.

    The sum over all N x M pairs of softplus(-z (scale * cosine + bias)), where z is 1 for a row's
    own pair and -1 otherwise, divided by N. Rows of the same group as a pair, other than the pair
    itself, are left out. Memory grows with N x D: the matrix of logits is seen in tiles.

    Returns:
        The loss of this rank's rows, a scalar in the embeddings' dtype, and metrics: `accuracy`
        (share of images that find their own text first; a tie is not first) and `candidates` a row.
    """
    f = features
    assert f.bias is not None, "the sigmoid loss needs a bias"
    value, gradients, found = _sigmoid(f.image, f.all_text, f.scale, f.bias, f.groups, f.own)
    loss = with_gradients(value, [f.image, f.all_text, f.scale, f.bias], gradients)
    return loss, {"accuracy": found, "candidates": float(len(f.all_text))}


@torch.no_grad()
def _sigmoid(
    image: Float[Tensor, "N D"],
    text: Float[Tensor, "M D"],
    scale: Float[Tensor, ""],
    bias: Float[Tensor, ""],
    groups: Int64[Tensor, " M"],
    own: slice,
) -> tuple[Float[Tensor, ""], list[Tensor], Float[Tensor, ""]]:
    """The loss, its gradients by image, text, scale and bias, and the share of texts found."""
    scaled, partners = scale * image, text[own]
    own_logits = (scaled * partners).sum(1) + bias
    own_slopes = -torch.sigmoid(-own_logits)
    value, by_bias = F.softplus(-own_logits).sum(), own_slopes.sum()
    by_image = own_slopes[:, None] * partners
    by_text = torch.zeros_like(text)
    by_text[own] = own_slopes[:, None] * image
    hardest = torch.full_like(own_logits, -torch.inf)

    for r, c, logits, same in tiles(scaled, text, groups[own], groups):
        logits.add_(bias).masked_fill_(same, -torch.inf)
        hardest[r] = torch.maximum(hardest[r], logits.amax(1))
        value += F.softplus(logits).sum()
        slopes = logits.sigmoid_()
        by_bias += slopes.sum()
        by_image[r].addmm_(slopes, text[c])
        by_text[c].addmm_(slopes.T, image[r])

    n = len(image)
    by_scale = (by_image * image).sum() / n  # scale and images enter as their product
    gradients = [
        by_image.mul_(scale / n),
        by_text.mul_(scale / n),
        by_scale.to(scale.dtype),
        (by_bias / n).to(bias.dtype),
    ]
    found = (own_logits - hardest > TIE * scale).to(image.dtype).mean()
    return value / n, gradients, found
