"""What every loss receives."""

from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Features:
    """Embeddings of one contrastive batch. N: rows of this rank, M: rows of all ranks.

    Embeddings have unit norm and are float32 or wider. Row i here is row `offset + i` of all.
    Rows of equal `groups` show the same thing and are never each other's negatives.

    In a single process `all_image` and `all_text` are the very tensors `image` and `text`.
    Otherwise they are gathered so that gradients flow back to the rank that a row came from; the
    mean over ranks of any loss here is then the single process's loss, and so are its gradients.
    """

    image: Float[Tensor, "N D"]
    text: Float[Tensor, "N D"]
    all_image: Float[Tensor, "M D"]
    all_text: Float[Tensor, "M D"]
    offset: int
    scale: Float[Tensor, ""]
    """exp(logit_scale): the only place where the temperature enters."""
    bias: Float[Tensor, ""] | None
    groups: Int64[Tensor, " M"]

    @property
    def own(self) -> slice:
        """Where this rank's rows stand among all."""
        return slice(self.offset, self.offset + len(self.image))
