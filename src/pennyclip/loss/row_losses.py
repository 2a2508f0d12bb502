"""How much each pair of a batch loses: which rows are to blame for a loss."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from pennyclip.loss.features import Features

CHUNK = 1024  # rows of the matrix of logits at a time


@torch.no_grad()
def row_losses(features: Features) -> Float[Tensor, " N"]:
    """Cross-entropy of each pair against its batch, both directions' mean, without own groups.

    For infonce, the loss by row; for the others a measure of the same kind. A row whose embedding
    is not finite loses infinitely much, and nothing is amiss with the others because of it.
    """
    broken = ~(torch.isfinite(features.image).all(1) & torch.isfinite(features.text).all(1))
    f = replace(
        features,
        image=features.image.nan_to_num(),
        text=features.text.nan_to_num(),
        all_image=features.all_image.nan_to_num(),
        all_text=features.all_text.nan_to_num(),
    )
    total = torch.zeros(len(f.image), device=f.image.device)
    groups = f.groups[f.own]
    for queries, candidates in ((f.image, f.all_text), (f.text, f.all_image)):
        for at in range(0, len(queries), CHUNK):
            part = slice(at, at + CHUNK)
            logits = f.scale * queries[part] @ candidates.T
            same = groups[part, None] == f.groups
            row = torch.arange(len(logits), device=logits.device)
            own = row + at + f.offset
            same[row, own] = False
            logits = logits.masked_fill(same, -torch.inf)
            total[part] += (logits.logsumexp(1) - logits[row, own]) / 2
    return total.masked_fill(broken, torch.inf)
