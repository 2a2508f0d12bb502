"""The largest batch that fits into memory, and the micro-batch that is fastest. Both measured.

A process of its own makes whole updates (forward, backward, step, in the recipe's precision) at
growing sizes, each with captions as long as the stage's longest, and tells its peak memory after
each. It stops before the next size would not fit; then the largest that a line through the last
two sizes promises is run as well. On a CPU the system gives that process no more than it may have,
so a wrong forecast costs the measurement and never makes the machine swap.

Speed is that of forward and backward: within a batch, the step is made once, however small the
micro-batch. Sizes take turns, and the median of their rounds counts.
"""

import itertools
import math
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from pennyclip.bench.workbench import Workbench, open_workbench, stage_number
from pennyclip.config import Config
from pennyclip.data.loader import Batch
from pennyclip.errors import RequestError, RunError
from pennyclip.memory import OutOfMemory, available

MARGIN = 0.1
"""Share of a batch's memory that is left free besides. Chosen: what allocators keep in fragments,
and what evaluation, saving and other processes take."""
FASTEST = 0.97
"""The smallest micro-batch with this share of the best speed is taken. Chosen: the noise of a
busy machine; more memory buys nothing below it."""
PATIENCE = 20.0
"""Seconds of an update beyond which no larger size is tried. Chosen: all sizes up to it then take
some 40 in all."""
SIZES_FROM = 2  # pairs: with fewer there is nothing to tell apart
MIB = 2**20


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


@dataclass(frozen=True)
class BatchSizes:
    """What was measured of a recipe on this machine."""

    device: str
    precision: str
    stage: str
    batch_size: int
    """The recipe's."""
    limit_bytes: int
    """What the process could have had when it began."""
    held_bytes: int
    """Inputs and embeddings of a whole batch, which stay while its micro-batches pass."""
    sizes: tuple[Size, ...]
    largest: int | None
    """Pairs that fit whole; None: not even two."""
    stopped: str
    """Why no larger size was run."""
    micro_batch: int | None
    """The fastest micro-batch that leaves the margin free; None: none does."""

    @property
    def advice(self) -> str:
        """What to set in the recipe."""
        if self.largest is None or self.micro_batch is None:
            return "not even two pairs fit: lower image_size, let fewer layers learn, or take less"
        if self.largest >= self.batch_size:
            return (
                f"batch_size = {self.batch_size} fits whole: leave micro_batch out, since gradient "
                "caching runs every tower forward twice"
            )
        return (
            f"batch_size = {self.batch_size} does not fit whole: micro_batch = {self.micro_batch}"
        )

    def __str__(self) -> str:
        lines = [
            f"{self.device}, {self.precision}, {self.stage}",
            f"memory to be had: {self.limit_bytes / MIB:,.0f} MiB, of which {MARGIN:.0%} of a "
            "batch's own need stays free",
            "",
            f"{'pairs':>7}{'peak MiB':>12}{'':>10}{'pairs/s, forward and backward':>32}",
        ]
        for size in self.sizes:
            speed = size.samples_per_second
            lines.append(
                f"{size.pairs:>7}{size.peak_bytes / MIB:>12,.0f}"
                f"{'' if size.fits else 'too large':>10}{f'{speed:,.1f}' if speed else '':>32}"
            )
        lines += ["", f"largest batch: {self.largest} ({self.stopped})", f"advice: {self.advice}"]
        return "\n".join(lines)


def measure_batch_sizes(
    config: Config, *, stage: int | None = None, up_to: int | None = None, rounds: int = 3
) -> BatchSizes:
    """Find the largest batch and the best micro-batch of a recipe.

    Args:
        config: with its data; `batch_size` is what micro-batches are wanted for.
        stage: from 1; None: the last, whose images are usually the largest.
        up_to: largest batch to try; None: what the dataset has rows for.
        rounds: timed updates of each size.

    Raises:
        RequestError: the recipe could not be trained as it stands.
        RunError: the measuring process failed for another reason than memory.
    """
    number = stage_number(config, stage, -1)
    if (up_to is not None and up_to < SIZES_FROM) or rounds < 1:
        raise RequestError(
            f"up_to = {up_to}, rounds = {rounds}: expected at least {SIZES_FROM} pairs and 1 round"
        )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    arguments = (theirs, config, number, up_to, rounds, torch.get_num_threads())
    process = context.Process(target=_measure, args=arguments, daemon=True)
    process.start()
    theirs.close()
    head: dict[str, Any] = {}
    sizes: dict[int, Size] = {}
    stopped = "the process that measured was killed, most likely because memory ran out"
    try:
        for kind, message in _messages(ours):
            if kind == "head":
                head = message
            elif kind == "size":
                sizes[message.pairs] = message
            elif kind == "stopped":
                stopped = message
            else:
                raise message
    finally:
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
    if not head:
        raise RunError(f"{stopped}, before any batch was run. Close other programs and try again.")
    found = tuple(sorted(sizes.values(), key=lambda size: size.pairs))
    limit, held = head["limit_bytes"], head["held_bytes"]
    beside = [s for s in found if s.samples_per_second and _fits(s.peak_bytes + held, limit)]
    best = max((s.samples_per_second or 0.0 for s in beside), default=0.0)
    fast = [s.pairs for s in beside if (s.samples_per_second or 0.0) >= FASTEST * best]
    return BatchSizes(
        **head,
        sizes=found,
        largest=max((s.pairs for s in found if s.fits), default=None),
        stopped=stopped,
        micro_batch=min(fast, default=None),
    )


def _messages(connection: Connection) -> Iterator[tuple[str, Any]]:
    while True:
        try:
            yield connection.recv()
        except EOFError:  # done, or dead
            return


def _fits(peak: int, limit: int) -> bool:
    return peak * (1 + MARGIN) <= limit


def _measure(
    out: Connection, config: Config, number: int, up_to: int | None, rounds: int, threads: int
) -> None:
    """The process that measures: sends what it finds as soon as it has it."""
    torch.set_num_threads(threads)
    try:
        bench = open_workbench(replace(config, workers=0), number)
        limit = _limit(bench.device)
        loader = bench.setup.loader
        most = len(loader.rows) if up_to is None else up_to
        out.send(
            (
                "head",
                {
                    "device": _name(bench.device),
                    "precision": bench.precision,
                    "stage": f"{bench.title}, {loader.image_size} px, up to {loader.text_length} "
                    "tokens",
                    "batch_size": config.batch_size,
                    "limit_bytes": limit,
                    "held_bytes": _held(bench),
                },
            )
        )
        sizes, stopped = [], f"larger ones were not asked for: --up-to {most}"
        if up_to is None:
            stopped = f"there are no more rows than {most}"
        for size in _growing(bench, most, limit):
            if isinstance(size, str):
                stopped = size
                break
            sizes.append(size)
            out.send(("size", size))
        out.send(("stopped", stopped))
        timed = max(config.batch_size, up_to or 0)  # a micro-batch is never larger
        for size in _timed(bench, [s for s in sizes if s.fits and s.pairs <= timed], rounds):
            out.send(("size", size))
    except (RequestError, RunError) as error:
        out.send(("error", error))
    except Exception as error:
        out.send(("error", RunError(f"measuring failed: {type(error).__name__}: {error}")))
    finally:
        out.close()


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _limit(device: torch.device) -> int:
    """Bytes that this process may hold; on Linux, the system sees to it."""
    if device.type == "cuda":
        return available(device) + torch.cuda.memory_allocated(device)
    free, own = available(device), psutil.Process().memory_info()
    if sys.platform == "linux":
        # The data segment counts what is asked for, also where nothing was written yet.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (own.data + free, hard))
    return own.rss + free


def _peak(device: torch.device) -> int:
    """Most bytes that this process has held, of which it may have given some back."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    status = Path("/proc/self/status")
    if status.is_file():  # Linux, whose ru_maxrss a new process inherits from its parent
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return 1024 * int(fields["VmHWM"].split()[0])
    scale = 1 if sys.platform == "darwin" else 1024
    return scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _held(bench: Workbench) -> int:
    """Bytes of a whole batch's inputs, and of two embeddings a pair with their gradients, raw and
    of unit norm, in float32."""
    batch = bench.setup.loader.batch(0)
    inputs = sum(x.nbytes for x in vars(batch).values() if torch.is_tensor(x))
    return inputs + len(batch.rows) * 2 * 2 * 2 * 4 * bench.model.config.embed_dim


def _growing(bench: Workbench, most: int, limit: int) -> Iterator[Size | str]:
    """Sizes, each about twice the one before, and then the largest that is promised to fit.

    Ends with a reason where that is not `most`.
    """
    done: list[Size] = []
    failed = False
    for pairs in _sizes(bench.config.batch_size, most):
        if done and not _fits(_forecast(done, pairs), limit):
            break
        if not done:
            _update(bench, _longest(bench, pairs))  # makes the optimizer's state
        seconds = _update(bench, _longest(bench, pairs))
        if failed := seconds is None:
            break
        peak = _peak(bench.device)
        done.append(Size(pairs, peak, _fits(peak, limit)))
        yield done[-1]
        if seconds is not None and seconds > PATIENCE and pairs < most:
            yield f"an update with {pairs} took {seconds:.0f} s, so larger ones were not run"
            return
    else:
        return
    between = min(_promised(done, limit), pairs - 1)
    if done and between > done[-1].pairs and _update(bench, _longest(bench, between)) is not None:
        peak = _peak(bench.device)
        yield Size(between, peak, _fits(peak, limit))
    yield f"memory ran out with {pairs}" if failed else f"{pairs} would not leave the margin free"


def _sizes(batch_size: int, most: int) -> Iterator[int]:
    """The recipe's batch with its halves and its doubles, the smallest first, and last `most`.

    Halves of the batch rather than powers of 2: they divide it into micro-batches of one size."""
    halves = [batch_size >> k for k in range(batch_size.bit_length())]
    doubles = (batch_size << k for k in itertools.count(1))
    growing = itertools.chain((n for n in reversed(halves) if n >= SIZES_FROM), doubles)
    yield from itertools.takewhile(lambda n: n < most, growing)
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


def _timed(bench: Workbench, sizes: list[Size], rounds: int) -> Iterator[Size]:
    """The sizes with their speed: in turns, on pairs as the data has them."""
    seconds: dict[int, list[float]] = {size.pairs: [] for size in sizes}
    for _, size in itertools.product(range(rounds), sizes):
        loader = replace(bench.setup.loader, batch_size=size.pairs)
        seconds[size.pairs].append(_update(bench, loader.batch(0)) or math.inf)
    for size in sizes:
        speed = size.pairs / statistics.median(seconds[size.pairs])
        yield replace(size, samples_per_second=speed)


def _longest(bench: Workbench, pairs: int) -> Batch:
    """A batch whose captions are all as long as the dataset's longest may be in this stage."""
    loader = replace(bench.setup.loader, batch_size=pairs)
    batch = loader.batch(0)
    if batch.tokens is None:
        return batch
    length = min(int(np.diff(loader.tokens.starts).max()), loader.text_length)
    width = max(length, batch.tokens.shape[1])
    tokens = batch.tokens[:, torch.arange(width) % batch.tokens.shape[1]]
    return replace(batch, tokens=tokens, lengths=torch.full((pairs,), length))


def _update(bench: Workbench, batch: Batch) -> float | None:
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
