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


class _Direction:
    """One softmax a query, over candidates that come tile by tile."""

    def __init__(self, own: Float[Tensor, " N"], by_group: bool) -> None:
        """Start with each query's own partner as its positive, or with none (`by_group`)."""
        nothing = torch.full_like(own, -torch.inf)
        first = nothing if by_group else own
        self.by_group = by_group
        self.negatives, self.hardest = nothing.clone(), nothing.clone()
        self.positives, self.best = first.clone(), first.clone()

    def see(self, at: slice, logits: Float[Tensor, "n m"], same: Bool[Tensor, "n m"]) -> None:
        """Take in the logits of the queries `at`; `same`: which are of one group."""
        others = logits.masked_fill(same, -torch.inf)
        self.negatives[at] = torch.logaddexp(self.negatives[at], others.logsumexp(1))
        self.hardest[at] = torch.maximum(self.hardest[at], others.amax(1))
        if self.by_group:
            group = logits.masked_fill(~same, -torch.inf)
            self.positives[at] = torch.logaddexp(self.positives[at], group.logsumexp(1))
            self.best[at] = torch.maximum(self.best[at], group.amax(1))

    def slopes(
        self, at: slice, logits: Float[Tensor, "n m"], same: Bool[Tensor, "n m"]
    ) -> Float[Tensor, "n m"]:
        """Derivatives by these logits, once all were seen; own partners are left to the caller."""
        total = torch.logaddexp(self.negatives[at], self.positives[at])[:, None]
        if not self.by_group:
            return (logits.masked_fill(same, -torch.inf) - total).exp_()
        group = logits.masked_fill(~same, -torch.inf)
        return (logits - total).exp_() - (group - self.positives[at, None]).exp_()


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
        directions[0].see(r, logits, same)
        if both:
            directions[1].see(c, logits.T, same.T)
    gaps = torch.stack([d.negatives - d.positives for d in directions])
    leads = torch.stack([d.best - d.hardest for d in directions])

    by_queries, by_candidates = torch.zeros_like(queries), torch.zeros_like(candidates)
    for r, c, logits, same in tiles(scaled, candidates, groups[own], groups):
        slopes = directions[0].slopes(r, logits, same)
        if both:
            slopes += directions[1].slopes(c, logits.T, same.T).T
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
