"""Gradient caching: a contrastive batch of any size in the memory of a small one, exactly.

Gao et al. 2021 (arXiv 2101.06983). The loss needs the embeddings of the whole batch, but not the
graphs behind them. So every micro-batch is embedded without a graph; the loss gives the gradient of
the embeddings (and, once, of temperature and bias); then every micro-batch is embedded again, with
a graph, through which its share of that gradient flows back.

The second pass must see what the first saw: patches to keep are sliced from those of the whole
batch, and whatever else is drawn inside a tower (dropout, stochastic depth) is drawn from the
micro-batch's own seed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from pennyclip.config import Config
from pennyclip.data.loader import Batch
from pennyclip.data.order import mix
from pennyclip.errors import RequestError

Embeddings = tuple[Float[Tensor, "B D"], Float[Tensor, "B D"]]
Embed = Callable[[Batch, Int64[Tensor, "B K"] | None], Embeddings]


class GradientCache:
    """The embeddings of a batch, made without a graph, and the way back through them."""

    def __init__(
        self,
        embed: Embed,
        batch: Batch,
        keep: Int64[Tensor, "B K"] | None,
        *,
        micro_batch: int,
        seed: int,
    ) -> None:
        """Embed a batch piece by piece.

        Args:
            embed: both towers on a micro-batch and the patches that its images keep.
            batch: the whole batch.
            keep: the patches that each of its images keeps; None: all.
            micro_batch: pairs in a piece; the last may be smaller.
            seed: of all that is drawn in this update.
        """
        self._embed, self._batch, self._keep, self._seed = embed, batch, keep, seed
        starts = range(0, len(batch.rows), micro_batch)
        self._pieces = [slice(start, start + micro_batch) for start in starts]
        with torch.no_grad():
            parts = [self._run(number) for number in range(len(self._pieces))]
        images, texts = zip(*parts, strict=True)
        self.embeddings: Embeddings = (
            torch.cat(images).requires_grad_(),
            torch.cat(texts).requires_grad_(),
        )

    def backward(self) -> None:
        """Pass the gradients of `embeddings` on to the towers' parameters."""
        for number, at in enumerate(self._pieces):
            # A tower may have nothing that learns: a frozen trunk and no head.
            towers = [
                (again, whole.grad[at])
                for again, whole in zip(self._run(number), self.embeddings, strict=True)
                if again.requires_grad and whole.grad is not None
            ]
            torch.autograd.backward([again for again, _ in towers], [grad for _, grad in towers])

    def _run(self, number: int) -> Embeddings:
        at = self._pieces[number]
        torch.manual_seed(micro_seed(self._seed, number))
        return self._embed(rows_of(self._batch, at), None if self._keep is None else self._keep[at])


def rows_of(batch: Batch, at: slice) -> Batch:
    """Some rows of a batch, padded as the whole is."""
    parts: dict[str, Any] = {
        name: None if value is None else value[at] for name, value in vars(batch).items()
    }
    return Batch(**parts)


def micro_seed(seed: int, number: int) -> int:
    """The seed of a micro-batch, from its update's seed and its number in the batch."""
    return int(mix(np.array([seed + number], np.uint64))[0] >> np.uint64(1))


def check_cacheable(model: nn.Module, config: Config) -> None:
    """Refuse a micro-batch that cannot be, or under which the model would learn something else.

    Raises:
        RequestError: it is not between 1 and the batch size, or a BatchNorm is in training mode.
    """
    if config.micro_batch is None:
        return
    if not 1 <= config.micro_batch <= config.batch_size:
        raise RequestError(
            f"micro_batch = {config.micro_batch}: it is a part of batch_size = "
            f"{config.batch_size}; set it between 1 and that, or leave it out."
        )
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]
    if norms and config.micro_batch < config.batch_size:
        raise RequestError(
            f"micro_batch = {config.micro_batch}: {len(norms)} BatchNorm layers ({norms[0]}, ...) "
            "take their statistics from the batch, and a micro-batch has others. Leave "
            "micro_batch out; or start from weights, whose stored statistics are then used; or "
            "take a tower without BatchNorm."
        )
