"""Gradient caching: a contrastive batch of any size in the memory of a small one, exactly.

Gao et al. 2021 (arXiv 2101.06983). The loss needs the embeddings of the whole batch, but not the
graphs behind them. So every micro-batch is embedded without a graph; the loss gives the gradient of
the embeddings (and, once, of temperature and bias); then every micro-batch is embedded again, with
a graph, through which its share of that gradient flows back.

In the second pass the towers take turns: one goes through all micro-batches, then the other. So
only one of them has a graph at a time, which makes room for the gradients of the parameters: those
are there from the first micro-batch on, while a batch that goes through whole has none at its peak.

The second pass must see what the first saw: patches to keep are sliced from those of the whole
batch, and whatever else is drawn inside a tower (dropout, stochastic depth) is drawn from a seed of
the micro-batch's and tower's own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Config
from pennyclip.data.loader import Batch
from pennyclip.data.order import mix

Tower = Callable[[Batch, Int64[Tensor, "B K"] | None], Float[Tensor, "B D"]]


class GradientCache:
    """The embeddings of a batch, made without a graph, and the way back through them."""

    def __init__(
        self,
        towers: tuple[Tower, Tower],
        batch: Batch,
        keep: Int64[Tensor, "B K"] | None,
        *,
        micro_batch: int,
        seed: int,
        rank: int = 0,
    ) -> None:
        """Embed a batch piece by piece.

        Args:
            towers: image and text embeddings of a micro-batch, whose images keep some patches.
            batch: the whole batch.
            keep: the patches that each of its images keeps; None: all.
            micro_batch: pairs in a piece; the last may be smaller.
            seed: of all that is drawn in this update.
            rank: of this process: as many ranks before have a batch of as many pieces.
        """
        self._towers, self._batch, self._keep, self._seed = towers, batch, keep, seed
        starts = range(0, len(batch.rows), micro_batch)
        self._before = rank * len(starts)
        self._pieces = [slice(start, start + micro_batch) for start in starts]
        with torch.no_grad():
            image, text = (
                torch.cat([self._run(tower, number) for number in range(len(self._pieces))])
                for tower in (0, 1)
            )
        self.embeddings = image.requires_grad_(), text.requires_grad_()

    def backward(self) -> None:
        """Pass the gradients of `embeddings` on to the towers' parameters."""
        for tower, whole in enumerate(self.embeddings):
            if whole.grad is None:
                continue
            for number, at in enumerate(self._pieces):
                again = self._run(tower, number)
                if not again.requires_grad:  # nothing in this tower learns
                    break
                again.backward(whole.grad[at])  # type: ignore[no-untyped-call]

    def _run(self, tower: int, number: int) -> Float[Tensor, "b D"]:
        at = self._pieces[number]
        torch.manual_seed(micro_seed(self._seed, self._before + number, tower))
        keep = None if self._keep is None else self._keep[at]
        return self._towers[tower](rows_of(self._batch, at), keep)


def rows_of(batch: Batch, at: slice) -> Batch:
    """Some rows of a batch, padded as the whole is."""
    parts: dict[str, Any] = {
        name: None if value is None else value[at] for name, value in vars(batch).items()
    }
    return Batch(**parts)


def micro_seed(seed: int, number: int, tower: int) -> int:
    """The seed of a tower (0: image, 1: text) in a micro-batch.

    Args:
        seed: of the update.
        number: of the micro-batch in its batch, of all ranks.
    """
    return int(mix(np.array([seed + 2 * number + tower], np.uint64))[0] >> np.uint64(1))


def learning_batch_norms(model: nn.Module) -> list[str]:
    """Names of the BatchNorm layers in training mode: under micro-batches they learn other things.

    They would take their statistics from each micro-batch, and twice.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]


def check_ranks(model: nn.Module, count: int) -> None:
    """Refuse a model that would become another one on each of several ranks.

    Raises:
        RequestError: a BatchNorm is in training mode.
    """
    norms = learning_batch_norms(model)
    if norms:
        raise RequestError(
            f"{len(norms)} BatchNorm layers ({norms[0]}, ...) take their statistics from the "
            f"batch, and each of {count} ranks has a part of it. Start from weights, whose stored "
            "statistics are then used; or take a tower without BatchNorm; or train in one process."
        )


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
    norms = learning_batch_norms(model)
    if norms and config.micro_batch < config.batch_size:
        raise RequestError(
            f"micro_batch = {config.micro_batch}: {len(norms)} BatchNorm layers ({norms[0]}, ...) "
            "take their statistics from the batch, and a micro-batch has others. Leave "
            "micro_batch out; or start from weights, whose stored statistics are then used; or "
            "take a tower without BatchNorm."
        )
