"""The losses as their papers write them, with the whole matrix: what the tiled ones must equal."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pennyclip.loss import Features


def infonce(f: Features) -> Tensor:
    own, same = _own_and_same(f)
    same[torch.arange(len(own)), own] = False
    losses = [F.cross_entropy(x.masked_fill(same, -torch.inf), own) for x in _logits(f)]
    return (losses[0] + losses[1]) / 2


def multi_positive(f: Features) -> Tensor:
    _, same = _own_and_same(f)
    losses = [
        (x.logsumexp(1) - x.masked_fill(~same, -torch.inf).logsumexp(1)).mean() for x in _logits(f)
    ]
    return (losses[0] + losses[1]) / 2


def sigmoid(f: Features) -> Tensor:
    assert f.bias is not None
    own, same = _own_and_same(f)
    rows = torch.arange(len(own))
    z = -torch.ones_like(same, dtype=f.image.dtype)
    z[rows, own] = 1
    same[rows, own] = False
    terms = -F.logsigmoid(z * (_logits(f)[0] + f.bias))
    return terms.masked_fill(same, 0).sum() / len(own)


def _logits(f: Features) -> tuple[Tensor, Tensor]:
    return f.scale * f.image @ f.all_text.T, f.scale * f.text @ f.all_image.T


def _own_and_same(f: Features) -> tuple[Tensor, Tensor]:
    own = torch.arange(len(f.image)) + f.offset
    return own, f.groups[own][:, None] == f.groups[None, :]


PLAIN = {"infonce": infonce, "multi_positive": multi_positive, "sigmoid": sigmoid}
