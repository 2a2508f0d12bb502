"""InfoNCE with several positives: MIL-NCE, its positives given by groups.

Miech et al. 2020 (arXiv 1912.06430), equation 1, with a softmax each for images and texts as in
CLIP. It is the loss L_in of Khosla et al. 2020 (SupCon, arXiv 2004.11362, equation 3) without its
constant, the logarithm of the number of positives; gradients are the same. It asks that the group
as a whole be found, and rests at 0 once it is. (SupCon's L_out and UniCL ask for every positive
alike, and rest at that logarithm.)
"""

from jaxtyping import Float
from torch import Tensor

from pennyclip.loss.features import Features
from pennyclip.loss.softmax import softmax_loss


def multi_positive(features: Features) -> tuple[Float[Tensor, ""], dict[str, float | Tensor]]:
    """MIL-NCE: InfoNCE in which every row of a pair's group is a positive of the pair.

    -log of the share of the softmax that the positives have together. Where every group has one
    row, this is `infonce`. Memory grows with N x D: the matrix of logits is seen in tiles.

    Returns:
        The loss of this rank's rows, a scalar in the embeddings' dtype, and metrics: `accuracy`
        (share of queries, both directions, whose first candidate is a positive) and `candidates`
        a row.
    """
    return softmax_loss(features, by_group=True)
