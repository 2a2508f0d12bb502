"""What a contrastive loss is by chance, and at best, where batches repeat pictures or captions.

A batch is B of N rows, drawn without replacement as an epoch does. A row whose group has s rows
meets j of the others in its batch with the hypergeometric probability

    P(j) = C(s - 1, j) C(N - s, B - 1 - j) / C(N - 1, B - 1)

A model that knows nothing gives all candidates one logit: its loss is the logarithm of how many
compete, B where repeats count as negatives, B - j where the row's group is masked, and B / (1 + j)
where it is positive as a whole. A model that knows all still cannot tell the 1 + j equal ones
apart: where they count as negatives, its loss is no less than ln(1 + j).
"""

from dataclasses import dataclass
from math import lgamma, log

import numpy as np
import numpy.typing as npt

from pennyclip.data.order import I64

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Chance:
    """Expected losses of one batch size, in nats."""

    batch_size: int
    plain: float
    """By chance, every other row a negative: ln B."""
    masked: float
    """By chance, rows of one group never each other's negatives (`infonce`)."""
    multi_positive: float
    """By chance, rows of one group each other's positives (`multi_positive`)."""
    floor: float
    """At best, were repeats negatives: what repeats cost a trainer that does not mask them."""


def chance(groups: I64, batch_size: int) -> Chance:
    """Chance levels and floor of the contrastive loss.

    Args:
        groups: [N] of the rows that are trained on.
        batch_size: 2 to N.
    """
    assert 2 <= batch_size <= len(groups)
    _, sizes = np.unique(groups, return_counts=True)
    size, count = np.unique(sizes, return_counts=True)
    masked = floor = 0.0
    for s, share in zip(size.tolist(), (size * count / len(groups)).tolist(), strict=True):
        others, p = _hypergeometric(len(groups) - 1, s - 1, batch_size - 1)
        masked += share * float(p @ np.log(batch_size - others))
        floor += share * float(p @ np.log1p(others))
    plain = log(batch_size)
    return Chance(batch_size, plain, masked, plain - floor, floor)


def _hypergeometric(total: int, marked: int, drawn: int) -> tuple[I64, F64]:
    """Possible numbers of marked ones among the drawn, and their probabilities."""
    values = np.arange(max(0, drawn - (total - marked)), min(marked, drawn) + 1)
    logs = [
        _log_choose(marked, j) + _log_choose(total - marked, drawn - j) for j in values.tolist()
    ]
    p = np.exp(np.array(logs) - max(logs))
    return values, p / p.sum()


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
