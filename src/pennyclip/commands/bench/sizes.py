"""Whole updates of growing size, as far as memory, rows or time go; and how fast some are."""

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.commands.bench.workbench import Workbench
from pennyclip.data.loader import Batch
from pennyclip.training.update.memory import OutOfMemory, peak

MARGIN = 0.1
"""Share of a batch's memory that is left free besides. Chosen: what allocators keep in fragments,
and what evaluation, saving and other processes take."""
PATIENCE = 20.0
"""Seconds of an update beyond which no larger size is tried. Chosen: all sizes up to it then take
some 40 in all."""
SIZES_FROM = 2  # pairs: with fewer there is nothing to tell apart


Ending = Literal["memory", "rows", "time", "up-to"]


class End(NamedTuple):
    """Why no larger size was run."""

    by: Ending
    words: str


@dataclass(frozen=True)
class Size:
    """A batch that was run whole."""

    pairs: int
    peak_bytes: int
    """Most memory that the process held: weights, gradients, optimizer and libraries included."""
    fits: bool
    """Whether it leaves the margin free."""
    samples_per_second: float | None = None
    """Of forward and backward."""


def check_up_to(pairs: int | None) -> None:
    """Refuse a largest size at which there is nothing to measure.

    Raises:
        RequestError: it is below SIZES_FROM.
    """
    if pairs is not None and pairs < SIZES_FROM:
        raise RequestError(f"up_to = {pairs}: expected at least {SIZES_FROM} pairs")


def fits(need: int, limit: int) -> bool:
    """Whether a peak leaves the margin free, both in bytes."""
    return need * (1 + MARGIN) <= limit


def growing(bench: Workbench, most: int, limit: int) -> Iterator[Size | End]:
    """Sizes, each about twice the one before, and then the largest that is promised to fit.

    Says why it ends, unless with `most`.
    """
    done: list[Size] = []
    failed = False
    for pairs in _sizes(bench.config.batch_size, most):
        if done and not fits(_forecast(done, pairs), limit):
            break
        if not done:
            update(bench, longest(bench, pairs))  # makes the optimizer's state
        seconds = update(bench, longest(bench, pairs))
        if failed := seconds is None:
            break
        done.append(_size(bench, pairs, limit))
        yield done[-1]
        if seconds is not None and seconds > PATIENCE and pairs < most:
            yield End("time", f"an update with {pairs} took {seconds:.0f} s, larger were not run")
            return
    else:
        return
    between = min(_promised(done, limit), pairs - 1)
    if done and between > done[-1].pairs and update(bench, longest(bench, between)) is not None:
        yield _size(bench, between, limit)
    ran_out, too_many = f"it ran out with {pairs}", f"{pairs} would not leave the margin free"
    yield End("memory", ran_out if failed else too_many)


def _size(bench: Workbench, pairs: int, limit: int) -> Size:
    """Of an update that was just made, the largest so far."""
    most = peak(bench.device)
    return Size(pairs, most, fits(most, limit))


def _sizes(batch_size: int, most: int) -> Iterator[int]:
    """The recipe's batch with its halves and its doubles, the smallest first, and last `most`.

    Halves of the batch rather than powers of 2: they divide it into micro-batches of one size."""
    halves = [batch_size >> k for k in range(batch_size.bit_length())]
    doubles = (batch_size << k for k in itertools.count(1))
    endless = itertools.chain((n for n in reversed(halves) if n >= SIZES_FROM), doubles)
    yield from itertools.takewhile(lambda n: n < most, endless)
    yield most


def _slope(done: list[Size]) -> float:
    """Bytes a pair, from the last two sizes; of a single one, all of it."""
    if len(done) < 2:
        return done[-1].peak_bytes / done[-1].pairs
    one, two = done[-2:]
    return (two.peak_bytes - one.peak_bytes) / (two.pairs - one.pairs)


def _forecast(done: list[Size], pairs: int) -> int:
    if len(done) < 2:  # most of the first peak is weights, whatever the size
        return done[-1].peak_bytes
    return round(done[-1].peak_bytes + _slope(done) * (pairs - done[-1].pairs))


def _promised(done: list[Size], limit: int) -> int:
    """The largest size that leaves the margin free if memory goes on growing as it did."""
    if not done:
        return 0
    room = limit / (1 + MARGIN) - done[-1].peak_bytes
    pairs = done[-1].pairs + int(room / max(_slope(done), 1.0))
    return pairs - pairs % 8 if pairs >= 16 else pairs  # what kernels like best


def timed(bench: Workbench, sizes: list[Size], rounds: int) -> Iterator[Size]:
    """The sizes with their speed: in turns, on pairs as the data has them."""
    seconds: dict[int, list[float]] = {size.pairs: [] for size in sizes}
    for _, size in itertools.product(range(rounds), sizes):
        loader = replace(bench.setup.loader, batch_size=size.pairs)
        seconds[size.pairs].append(update(bench, loader.batch(0)) or math.inf)
    for size in sizes:
        speed = size.pairs / statistics.median(seconds[size.pairs])
        yield replace(size, samples_per_second=speed)


def longest(bench: Workbench, pairs: int) -> Batch:
    """Pairs whose captions are all as long as the dataset's longest may be in this stage.

    Beyond the recipe's batch its rows come again and again: what they show takes no memory, and
    decoding thousands of pictures takes minutes.
    """
    loader = replace(bench.setup.loader, batch_size=min(pairs, bench.config.batch_size))
    batch: Batch = _repeated(loader.batch(0), torch.arange(pairs) % loader.batch_size)
    if batch.tokens is None:
        return batch
    length = min(int(np.diff(loader.tokens.starts).max()), loader.text_length)
    width = max(length, batch.tokens.shape[1])
    tokens = batch.tokens[:, torch.arange(width) % batch.tokens.shape[1]]
    return replace(batch, tokens=tokens, lengths=torch.full((pairs,), length))


def _repeated(part: Any, at: Int64[Tensor, " B"]) -> Any:
    """A batch, or what it is made of, with the rows of these places."""
    if isinstance(part, Tensor):
        return part[at]
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{name: _repeated(value, at) for name, value in vars(part).items()})
    return part


def update(bench: Workbench, batch: Batch) -> float | None:
    """Make an update of a whole batch.

    Returns:
        Seconds that it took without the optimizer's step; None: memory ran out.
    """
    optimizer = bench.setup.optimizer
    setup = replace(bench.setup, loader=replace(bench.setup.loader, batch_size=len(batch.rows)))
    least = min(bench.stage.mask_range)  # dropped: the update that takes most memory
    times: list[float] = []

    def clock(*_: object) -> None:
        if bench.device.type == "cuda":
            torch.cuda.synchronize(bench.device)
        times.append(time.perf_counter())

    bench.plan.set_rates(optimizer, 0)
    hooks = [optimizer.register_step_pre_hook(clock), optimizer.register_step_post_hook(clock)]
    clock()
    try:
        record = bench.update(setup, batch, 0, bench.scaler, mask_ratio=least)
        if record["shortage"] is not None:
            return None
    except OutOfMemory:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    clock()
    # Between the second and the third lies the step; fp16 may have skipped it.
    begin, *step, end = times
    return end - begin - (step[1] - step[0] if step else 0.0)
