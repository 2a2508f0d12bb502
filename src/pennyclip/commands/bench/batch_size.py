"""The largest batch that fits into memory, and the micro-batch that is fastest. Both measured.

A process of its own makes whole updates (forward, backward, step, in the recipe's precision) at
growing sizes, each with captions as long as the stage's longest, and tells its peak memory after
each: what making the model and storing its frozen layers' features took is not counted. It stops
before the next size would not fit; then the largest that a line through the last two sizes promises
is run as well. On a CPU the system gives that process no more than it may have, so a wrong forecast
costs the measurement and never makes the machine swap.

Speed is that of forward and backward: within a batch, the step is made once, however small the
micro-batch. Sizes take turns, and the median of their rounds counts.
"""

import multiprocessing
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from pennyclip.base.errors import RequestError, RunError
from pennyclip.commands.bench.sizes import (
    MARGIN,
    End,
    Ending,
    Size,
    check_up_to,
    fits,
    growing,
    timed,
)
from pennyclip.commands.bench.workbench import Workbench, open_workbench, stage_number
from pennyclip.config.keys import Config
from pennyclip.training.update.memory import available, reset_peak

FASTEST = 0.97
"""The smallest micro-batch with this share of the best speed is taken. Chosen: the noise of a
busy machine; more memory buys nothing below it."""
MIB = 2**20


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
    ended_by: Ending
    """What kept larger ones from being run; only memory says that they would not fit."""
    stopped: str
    """The same in words."""
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
        lines += ["", f"largest batch: {self.largest} ({self.ended_by}: {self.stopped})"]
        lines += [f"advice: {self.advice}"]
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
    check_up_to(up_to)
    if rounds < 1:
        raise RequestError(f"rounds = {rounds}: expected at least 1")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    arguments = (theirs, config, number, up_to, rounds, torch.get_num_threads())
    process = context.Process(target=_measure, args=arguments, daemon=True)
    process.start()
    theirs.close()
    head: dict[str, Any] = {}
    sizes: dict[int, Size] = {}
    end = End("memory", "the process that measured was killed, most likely for want of memory")
    try:
        for kind, message in _messages(ours):
            if kind == "head":
                head = message
            elif kind == "size":
                sizes[message.pairs] = message
            elif kind == "end":
                end = message
            else:
                raise message
    finally:
        process.join(timeout=10)
        if process.is_alive():
            process.kill()
    if not head:
        raise RunError(f"{end.words}, before any batch was run. Close other programs, try again.")
    found = tuple(sorted(sizes.values(), key=lambda size: size.pairs))
    limit, held = head["limit_bytes"], head["held_bytes"]
    beside = [s for s in found if s.samples_per_second and fits(s.peak_bytes + held, limit)]
    best = max((s.samples_per_second or 0.0 for s in beside), default=0.0)
    fast = [s.pairs for s in beside if (s.samples_per_second or 0.0) >= FASTEST * best]
    return BatchSizes(
        **head,
        sizes=found,
        largest=max((s.pairs for s in found if s.fits), default=None),
        ended_by=end.by,
        stopped=end.words,
        micro_batch=min(fast, default=None),
    )


def _messages(connection: Connection) -> Iterator[tuple[str, Any]]:
    while True:
        try:
            yield connection.recv()
        except EOFError:  # done, or dead
            return


def _measure(
    out: Connection, config: Config, number: int, up_to: int | None, rounds: int, threads: int
) -> None:
    """The process that measures: sends what it finds as soon as it has it."""
    torch.set_num_threads(threads)
    try:
        bench = open_workbench(replace(config, workers=0), number)
        reset_peak(bench.device)
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
        sizes, end = [], End("up-to", f"larger ones were not asked for, --up-to {most}")
        if up_to is None:
            end = End("rows", f"there are no more than {most} to train on")
        for size in growing(bench, most, limit):
            if isinstance(size, End):
                end = size
                break
            sizes.append(size)
            out.send(("size", size))
        out.send(("end", end))
        useful = max(config.batch_size, up_to or 0)  # a micro-batch is never larger
        for size in timed(bench, [s for s in sizes if s.fits and s.pairs <= useful], rounds):
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
        if hard != resource.RLIM_INFINITY:  # `ulimit -d`
            free = min(free, hard - own.data)
        resource.setrlimit(resource.RLIMIT_DATA, (own.data + free, hard))
    return own.rss + free


def _held(bench: Workbench) -> int:
    """Bytes of a whole batch's inputs, and of two embeddings a pair with their gradients, raw and
    of unit norm, in float32."""
    batch = bench.setup.loader.batch(0)
    inputs = sum(x.nbytes for x in vars(batch).values() if torch.is_tensor(x))
    return inputs + len(batch.rows) * 2 * 2 * 2 * 4 * bench.model.config.embed_dim
