"""InfoNCE in both directions: CLIP's loss.

Radford et al. 2021, figure 3; van den Oord et al. 2018, equation 4.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pennyclip.loss.features import Features

MAX_SCALE = 100.0  # Radford et al. 2021, section 2.5: the temperature is kept from exploding


def infonce(features: Features) -> tuple[Tensor, dict[str, float | Tensor]]:
    """Mean over both directions of the cross-entropy of each pair against all candidates.

    Rows of the same group as a pair, other than the pair itself, are left out of its candidates.

    Returns:
        The loss of this rank's rows, a scalar in float32 or wider, and metrics: `accuracy` (share
        of pairs found first, both directions) and `candidates` a row.
    """
    n, m = len(features.image), len(features.all_image)
    own = torch.arange(n, device=features.image.device) + features.offset
    same = features.groups[own][:, None] == features.groups[None, :]
    same[torch.arange(n, device=same.device), own] = False

    losses, hits = [], []
    for queries, candidates in (
        (features.image, features.all_text),
        (features.text, features.all_image),
    ):
        logits = features.scale * queries @ candidates.T
        logits = logits.masked_fill(same, -torch.inf)
        losses.append(F.cross_entropy(logits, own))
        hits.append((logits.argmax(1) == own).float().mean())
    loss = (losses[0] + losses[1]) / 2
    return loss, {"accuracy": (hits[0] + hits[1]).detach() / 2, "candidates": float(m)}
