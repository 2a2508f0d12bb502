"""Several processes make one update: data parallel. The only file that knows ranks.

Each has an equal part of a batch, one behind the other, and the same weights. Embeddings are
gathered, so the loss of a rank's rows sees all candidates; the mean over ranks is the loss of the
whole batch. Each rank's share of the gradient is then summed once, before anything is decided by
it: from equal numbers all ranks decide alike.

What one rank cannot do, none does. Before every message all agree that they have come so far, and
one that has not says so at that place, so nobody waits for a message that never comes.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from pennyclip.base.errors import RequestError, RunError
from pennyclip.training.update.memory import ran_out

T = TypeVar("T")

ALONE = 2**20
"""Bytes from which a tensor is a message of its own; smaller ones share one. Chosen: copying these
costs little, and a model has hundreds of them."""

FINE, RAN_OUT, FAILED = range(3)
"""What a rank says of itself; the worst counts."""


class Ranks:
    """The processes of torch's default group, which is there already.

    It needs a backend for CPUs beside the GPUs' (`torch.distributed.init_process_group()` gives it
    both): to agree, hosts talk to each other, and no GPU is waited for.
    """

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def part(self, rows: int) -> slice:
        """Where this rank's rows stand among those of all, if each has as many."""
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def gather(self, *own: Shaped[Tensor, "N ..."]) -> tuple[Shaped[Tensor, "M ..."], ...]:
        """Tensors of this rank's rows -> of all ranks' rows, in the order of ranks.

        Gradients flow back to the rank that a row came from, summed over all that used it.
        """
        return _Gather.apply(self, *own)

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all ranks, the same bits on each."""
        small = [tensor for tensor in tensors if tensor.nbytes < ALONE]
        large = [tensor for tensor in tensors if tensor.nbytes >= ALONE]
        messages = [tensor.contiguous() for tensor in large]
        if small:
            messages.append(torch.cat([tensor.flatten() for tensor in small]))
        self.agree()
        for message in messages:
            dist.all_reduce(message)
        for tensor, message in zip(large, messages, strict=False):
            if message is not tensor:
                tensor.copy_(message)
        if small:
            sums = torch.split(messages[-1], [tensor.numel() for tensor in small])
            for tensor, part in zip(small, sums, strict=True):
                tensor.copy_(part.view_as(tensor))

    def mean(self, record: dict[str, Any]) -> dict[str, Any]:
        """A record with its tensors, scalars, averaged over all ranks; numbers stay."""
        scalars = {name: value for name, value in record.items() if torch.is_tensor(value)}
        means = torch.stack([value.float() for value in scalars.values()]) / self.count
        self.sum_([means])
        return record | dict(zip(scalars, means.unbind(), strict=True))

    def everywhere(self, own: T) -> list[T]:
        """What each rank has found, in the order of ranks."""
        found: list[Any] = [None] * self.count
        self.agree()
        dist.all_gather_object(found, own)
        return found

    def agree(self, own: int = FINE) -> None:
        """Wait for all ranks.

        Raises:
            RuntimeError: another rank is worse off. If memory ran out there, `memory.ran_out` holds
                of the error; otherwise it is a RunError.
        """
        told = torch.tensor(own * self.count + self.rank)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        worst, rank = divmod(int(told), self.count)
        if worst > own:
            if worst == RAN_OUT:
                raise _RanOutElsewhere(f"memory ran out on rank {rank}")
            raise _FailedElsewhere(
                f"rank {rank} failed, and no rank goes on without the others. What rank {rank} "
                "says is the cause."
            )


class _RanOutElsewhere(torch.OutOfMemoryError):
    """All ranks know already."""


class _FailedElsewhere(RunError):
    """All ranks know already."""


@contextmanager
def together(ranks: Ranks | None) -> Iterator[None]:
    """What is done inside is done by all ranks, or raises on all of them.

    Args:
        ranks: None: a single process, with which everybody agrees.

    Raises:
        RuntimeError: as `Ranks.agree`, where another rank has failed. One that fails raises its
            own error.
    """
    if ranks is None:
        yield
        return
    try:
        yield
        ranks.agree()
    except (_RanOutElsewhere, _FailedElsewhere):
        raise
    except Exception as error:
        ranks.agree(RAN_OUT if isinstance(error, RuntimeError) and ran_out(error) else FAILED)
        raise


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        parts = [part.contiguous() for part in own]
        wholes = [part.new_empty(ranks.count * len(part), *part.shape[1:]) for part in parts]
        ranks.agree()
        for part, whole in zip(parts, wholes, strict=True):
            dist.all_gather(list(whole.chunk(ranks.count)), part)
        ctx.mark_non_differentiable(*(whole for whole in wholes if not whole.is_floating_point()))
        return tuple(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *wholes: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        sums = [w.clone() if n else None for w, n in zip(wholes, needed, strict=True)]
        ctx.ranks.sum_([whole for whole in sums if whole is not None])
        count = ctx.ranks.count
        return None, *(w if w is None else w[ctx.ranks.part(len(w) // count)] for w in sums)


def check_alone() -> None:
    """Refuse to be one of several processes where only one is meant.

    Raises:
        RequestError: a launcher has started this process beside others.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if count != "1":
        raise RequestError(
            f"training runs in one process, and this is one of {count} (WORLD_SIZE = {count} in "
            "the environment, as torchrun sets it). Nothing was done. Start the command once, "
            "without a launcher; or unset WORLD_SIZE if it is left from elsewhere."
        )
