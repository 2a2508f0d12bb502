"""A softmax over candidates, in tiles: what InfoNCE and its multi-positive form have in common.

For query i with logits l[i, j], negatives N (candidates of other groups) and positives P, the loss
and its derivative are

    loss[i] = -log( sum_P exp l[i, j] / sum_PN exp l[i, j] ) = softplus( lse_N l[i] - lse_P l[i] )
    d loss[i] / d l[i, j] = exp( l[i, j] - lse_PN l[i] )  -  [j in P] exp( l[i, j] - lse_P l[i] )

where lse is the logarithm of a sum of exponentials, shifted by the largest so that none overflows.
Texts rank images by the same matrix, read by columns. So the tiles are walked twice, once for the
log-sum-exps of both directions and once for the gradient: four matrix products in all, where
autograd takes six.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from pennyclip.loss.features import Features
from pennyclip.loss.tiles import tiles, with_gradients

TIE = 1e-6
"""Cosines no further apart than this are a tie. Chosen: above float32's rounding, about 1e-7, and
far below the differences between embeddings that have not collapsed."""


def softmax_loss(
    features: Features, *, by_group: bool
) -> tuple[Float[Tensor, ""], dict[str, float | Tensor]]:
    """Mean over both directions of -log of the share of the softmax that falls on the positives.

    Args:
        features: of this rank and of all.
        by_group: every candidate of a query's group is its positive; otherwise its own partner
            alone is, and the rest of the group is left out.

    Returns:
        The loss of this rank's rows, in the embeddings' dtype, and metrics: `accuracy` (share of
        queries, both directions, with a positive ahead of all negatives; a tie is not ahead) and
        `candidates` a row.
    """
    f = features
    if f.all_image is f.image and f.all_text is f.text:
        matrices = [(f.image, f.text, True)]
    else:
        matrices = [(f.image, f.all_text, False), (f.text, f.all_image, False)]
    values, shares = [], []
    for queries, candidates, both in matrices:
        value, gradients, found = _contrast(
            queries, candidates, f.scale, f.groups, f.own, by_group=by_group, both=both
        )
        values.append(with_gradients(value, [queries, candidates, f.scale], gradients))
        shares.append(found)
    loss, accuracy = torch.stack(values).sum(), torch.stack(shares).sum()
    return loss, {"accuracy": accuracy, "candidates": float(len(f.all_image))}


class _Seen:
    """Log-sum-exp and maximum of the logits that each query has met so far."""

    def __init__(self, first: Float[Tensor, " N"]) -> None:
        self.sum, self.top = first.clone(), first.clone()

    def add(self, at: slice, logits: Float[Tensor, "n m"]) -> None:
        """Take in more logits of the queries `at`."""
        top = logits.amax(1)
        shift = top.clamp(min=torch.finfo(top.dtype).min)  # finite where all are -inf
        total = (logits - shift[:, None]).exp_().sum(1).log_().add_(shift)
        self.sum[at] = torch.logaddexp(self.sum[at], total)
        self.top[at] = torch.maximum(self.top[at], top)


class _Direction:
    """One softmax a query, over candidates that come tile by tile.

    A tile comes as its `parts`: the negatives' logits and, where positives are groups, the
    positives' logits, the rest of each at -inf.
    """

    def __init__(self, own: Float[Tensor, " N"], by_group: bool) -> None:
        """Start with each query's own partner as its positive, or with none (`by_group`)."""
        nothing = torch.full_like(own, -torch.inf)
        self.negatives, self.positives = _Seen(nothing), _Seen(nothing if by_group else own)

    def see(self, at: slice, parts: list[Float[Tensor, "n m"]]) -> None:
        for seen, logits in zip((self.negatives, self.positives), parts, strict=False):
            seen.add(at, logits)

    def slopes(self, at: slice, parts: list[Float[Tensor, "n m"]]) -> Float[Tensor, "n m"]:
        """Derivatives by a tile's logits once all were seen; own partners are not in it."""
        positives = self.positives.sum[at]
        total = torch.logaddexp(self.negatives.sum[at], positives)
        out = (parts[0] - total[:, None]).exp_()
        for group in parts[1:]:
            out += (group - total[:, None]).exp_()
            out -= (group - positives[:, None]).exp_()
        return out


def _parts(
    logits: Float[Tensor, "n m"], same: Bool[Tensor, "n m"], by_group: bool
) -> list[Float[Tensor, "n m"]]:
    """What a `_Direction` takes, from the logits of a tile, which are overwritten."""
    if not by_group:
        return [logits.masked_fill_(same, -torch.inf)]
    return [logits.masked_fill(same, -torch.inf), logits.masked_fill_(~same, -torch.inf)]


@torch.no_grad()
def _contrast(
    queries: Float[Tensor, "N D"],
    candidates: Float[Tensor, "M D"],
    scale: Float[Tensor, ""],
    groups: Int64[Tensor, " M"],
    own: slice,
    *,
    by_group: bool,
    both: bool,
) -> tuple[Float[Tensor, ""], list[Tensor], Float[Tensor, ""]]:
    """One matrix, read by rows, or by rows and columns (`both`, with N = M).

    Returns:
        Half the mean loss of each direction, summed; its gradients with respect to queries,
        candidates and scale; half the share found of each direction, summed.
    """
    scaled, partners = scale * queries, candidates[own]
    own_logits = (scaled * partners).sum(1)
    directions = [_Direction(own_logits, by_group) for _ in range(1 + both)]

    for r, c, logits, same in tiles(scaled, candidates, groups[own], groups):
        parts = _parts(logits, same, by_group)
        directions[0].see(r, parts)
        if both:
            directions[1].see(c, [part.T for part in parts])
    gaps = torch.stack([d.negatives.sum - d.positives.sum for d in directions])
    leads = torch.stack([d.positives.top - d.negatives.top for d in directions])

    by_queries, by_candidates = torch.zeros_like(queries), torch.zeros_like(candidates)
    for r, c, logits, same in tiles(scaled, candidates, groups[own], groups):
        parts = _parts(logits, same, by_group)
        slopes = directions[0].slopes(r, parts)
        if both:
            slopes += directions[1].slopes(c, [part.T for part in parts]).T
        by_queries[r].addmm_(slopes, candidates[c])
        by_candidates[c].addmm_(slopes.T, queries[r])
    if not by_group:
        own_slopes = -gaps.sigmoid().sum(0)[:, None]
        by_queries.addcmul_(own_slopes, partners)
        by_candidates[own].addcmul_(own_slopes, queries)

    share = 0.5 / len(queries)
    by_scale = (by_queries * queries).sum() * share  # scale and queries enter as their product
    gradients = [
        by_queries.mul_(scale * share),
        by_candidates.mul_(scale * share),
        by_scale.to(scale.dtype),
    ]
    found = (leads > TIE * scale).to(queries.dtype)
    return F.softplus(gaps).sum() * share, gradients, found.sum() * share
