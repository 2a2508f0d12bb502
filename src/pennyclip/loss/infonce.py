"""InfoNCE in both directions: CLIP's loss.

Radford et al. 2021 (arXiv 2103.00020), figure 3; van den Oord et al. 2018 (arXiv 1807.03748),
equation 4.
"""

from jaxtyping import Float
from torch import Tensor

from pennyclip.loss.features import Features
from pennyclip.loss.softmax import softmax_loss

INITIAL_SCALE = 1 / 0.07  # Radford et al. 2021, section 2.5, after Wu et al. 2018
MAX_SCALE = 100.0  # Radford et al. 2021, section 2.5: the temperature is kept from exploding


def infonce(features: Features) -> tuple[Float[Tensor, ""], dict[str, float | Tensor]]:
    """InfoNCE (CLIP): the cross-entropy of each pair against all candidates, both directions.

    Rows of the same group as a pair, other than the pair itself, are left out of its candidates.
    Memory grows with N x D: the matrix of logits is seen in tiles.

    Returns:
        The loss of this rank's rows, a scalar in the embeddings' dtype, and metrics: `accuracy`
        (share of pairs found first, both directions) and `candidates` a row.
    """
    return softmax_loss(features, by_group=False)
