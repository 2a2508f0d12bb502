"""The largest batch and the best micro-batch: real on a small model, exact on a made-up one."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pennyclip.base.errors import RequestError
from pennyclip.commands.bench import batch_size
from pennyclip.commands.bench import sizes as module_sizes
from pennyclip.commands.bench.batch_size import MIB, BatchSizes, measure_batch_sizes
from pennyclip.commands.bench.sizes import MARGIN, End, Size, growing, longest, update
from pennyclip.commands.bench.workbench import open_workbench
from pennyclip.config.keys import Augment, Config
from pennyclip.data.index import Dataset
from pennyclip.training.update.memory import peak, reset_peak
from small_runs import small_run

CPU = torch.device("cpu")


def small(data: Path, **changed: Any) -> Config:
    return small_run(data, image_size=64, batch_size=32, **changed)


def test_a_small_model_is_measured(small_dataset: Path) -> None:
    config = small(small_dataset)
    found = measure_batch_sizes(config, up_to=64, rounds=1)
    assert [size.pairs for size in found.sizes] == [2, 4, 8, 16, 32, 64]
    peaks = [size.peak_bytes for size in found.sizes]
    assert peaks == sorted(peaks)
    # What a block of the ViT (17 tokens of 192 in float32) keeps of a pair: 16 times its input at
    # least, 12 blocks.
    kept = 12 * 16 * 17 * 192 * 4
    assert 0.7 * kept < (peaks[-1] - peaks[-2]) / 32 < 4 * kept
    assert (found.largest, found.batch_size) == (64, 32)
    assert found.micro_batch in range(2, 65)
    assert found.held_bytes > 32 * 3 * 64 * 64
    assert "leave micro_batch out" in found.advice
    assert f"{found.sizes[-1].samples_per_second:,.1f}" in str(found)


def test_unasked_it_looks_as_far_as_there_are_rows(small_dataset: Path) -> None:
    """Not only as far as the recipe's own batch; what is larger has no speed of a micro-batch."""
    rows = len(Dataset(small_dataset).subset("train"))
    found = measure_batch_sizes(small(small_dataset), rounds=1)
    assert found.largest == rows > 2 * found.batch_size
    assert [s.pairs for s in found.sizes if s.samples_per_second] == [2, 4, 8, 16, 32]
    assert found.ended_by == "rows"
    assert f"largest batch: {rows} (rows: there are no more than {rows} to train on)" in str(found)


def test_a_recipe_that_cannot_be_trained_is_refused_by_the_process_too(
    small_dataset: Path,
) -> None:
    with pytest.raises(RequestError, match="fewer than batch_size = 100000"):
        measure_batch_sizes(replace(small(small_dataset), batch_size=100_000), up_to=4)
    with pytest.raises(RequestError, match="stages 1 to 1"):
        measure_batch_sizes(small(small_dataset), stage=2)
    with pytest.raises(RequestError, match="at least 2 pairs"):
        measure_batch_sizes(small(small_dataset), up_to=1)


class Machine:
    """Memory that grows in a straight line, and updates that take a while."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, base: int, slope: int, seconds: float = 0.0
    ) -> None:
        self.base, self.slope, self.seconds, self.ran = base, slope, seconds, list[int]()
        self.room = 10**12
        monkeypatch.setattr(module_sizes, "longest", lambda _, pairs: pairs)
        monkeypatch.setattr(module_sizes, "update", self.update)
        monkeypatch.setattr(module_sizes, "peak", lambda _: self.need(max(self.ran)))

    def need(self, pairs: int) -> int:
        return self.base + self.slope * pairs

    def update(self, _: object, pairs: int) -> float | None:
        if self.need(pairs) > self.room:
            return None
        self.ran.append(pairs)
        return self.seconds * pairs

    def sizes(self, most: int, limit: int, batch: int = 32) -> tuple[list[Size], End | None]:
        bench: Any = SimpleNamespace(device=CPU, config=SimpleNamespace(batch_size=batch))
        found = list(growing(bench, most, limit))
        end = found.pop() if isinstance(found[-1], End) else None
        return [size for size in found if isinstance(size, Size)], end


def test_the_largest_batch_is_the_one_that_leaves_the_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, base=5000, slope=30)
    sizes, end = machine.sizes(most=10**6, limit=22_000)
    room = (22_000 / (1 + MARGIN) - 5000) / 30  # 500 pairs
    assert [s.pairs for s in sizes] == [2, 4, 8, 16, 32, 64, 128, 256, int(room) // 8 * 8]
    assert all(size.fits for size in sizes)
    assert end == ("memory", "512 would not leave the margin free")
    assert max(machine.ran) == 496  # nothing larger was ever run
    sizes, end = machine.sizes(most=48, limit=22_000)
    assert ([s.pairs for s in sizes], end) == ([2, 4, 8, 16, 32, 48], None)


@pytest.mark.parametrize(
    ("batch", "most", "expected"),
    [
        (100, 400, [3, 6, 12, 25, 50, 100, 200, 400]),
        (100, 130, [3, 6, 12, 25, 50, 100, 130]),
        (100, 20, [3, 6, 12, 20]),  # asked for less than the recipe's batch
        (3, 3, [3]),
        (2, 8, [2, 4, 8]),
    ],
)
def test_the_recipes_own_batch_is_among_the_sizes(
    batch: int, most: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, base=5000, slope=30)
    sizes, _ = machine.sizes(most, 10**9, batch)
    assert [size.pairs for size in sizes] == expected


def test_a_wrong_forecast_costs_no_more_than_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, base=5000, slope=30)
    machine.room = machine.need(100)  # less than what the machine promises
    sizes, end = machine.sizes(most=10**6, limit=10**6)
    assert [s.pairs for s in sizes] == [2, 4, 8, 16, 32, 64]
    assert end == ("memory", "it ran out with 128")
    machine = Machine(monkeypatch, base=5000, slope=30)
    machine.room = 0
    assert machine.sizes(most=8, limit=10**6) == ([], ("memory", "it ran out with 2"))


def test_slow_updates_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, base=5000, slope=30, seconds=2.0)
    sizes, end = machine.sizes(most=10**6, limit=10**9)
    assert [s.pairs for s in sizes] == [2, 4, 8, 16]
    assert end == ("time", "an update with 16 took 32 s, larger were not run")


def test_advice_goes_by_what_fits_and_how_fast() -> None:
    found = BatchSizes(
        device="CPU", precision="fp32", stage="stage 1 of 1", batch_size=64, limit_bytes=2**30,
        held_bytes=2**20, sizes=(Size(2, 2**28, True, 10.0), Size(4, 2**29, True, 20.0)),
        largest=4, ended_by="memory", stopped="8 would not leave the margin free", micro_batch=4,
    )  # fmt: skip
    assert found.advice == "batch_size = 64 does not fit whole: micro_batch = 4"
    assert "1,024 MiB" in str(found)
    assert "largest batch: 4 (memory: 8 would not leave the margin free)" in str(found)
    assert "not even two pairs fit" in replace(found, largest=None, micro_batch=None).advice


@pytest.mark.parametrize("limited", ["by what is free", "by ulimit -d"])
def test_the_system_gives_the_process_no_more_than_there_is(limited: str) -> None:
    """So that it never swaps: an allocation beyond that fails at once, as torch's own error."""
    code = """
import resource, sys
import psutil
import torch
from pennyclip.commands.bench import batch_size
from pennyclip.training.update.memory import ran_out
if sys.argv[1] == "by ulimit -d":
    most = psutil.Process().memory_info().data + 300 * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
else:
    batch_size.available = lambda device: 300 * 2**20
limit = batch_size._limit(torch.device("cpu"))
assert abs(limit - psutil.Process().memory_info().rss - 300 * 2**20) < 20 * 2**20
held = torch.ones(50 * 2**20)
try:
    torch.ones(100 * 2**20)
except RuntimeError as error:
    assert ran_out(error), error
    print("refused")
"""
    command = [sys.executable, "-c", code, limited]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_what_the_start_took_is_not_counted(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the features of frozen layers do, or weights that are read and copied."""
    told: list[tuple[str, Any]] = []
    out: Any = SimpleNamespace(send=told.append, close=lambda: None)

    def opened(*arguments: Any) -> Any:
        torch.ones(100 * MIB)  # 400 MiB
        return open_workbench(*arguments)

    monkeypatch.setattr(batch_size, "open_workbench", opened)
    monkeypatch.setattr(batch_size, "_limit", lambda _: 2**40)  # would bind this process
    reset_peak(CPU)
    before = peak(CPU)
    batch_size._measure(out, small(small_dataset), 0, 4, 1, torch.get_num_threads())
    head, (_, first), *_ = told
    assert head[0] == "head"
    assert first.pairs == 2
    assert first.peak_bytes < before + 250 * MIB  # the model, its optimizer, and 2 pairs


def test_captions_are_as_long_as_the_longest_and_the_step_is_not_timed(
    small_dataset: Path,
) -> None:
    augment = Augment(flip=0.5, color_jitter=0.2)
    bench = open_workbench(small(small_dataset, augment=augment), 0)
    batch = longest(bench, 8)
    sizes = bench.rows.tokens.starts[1:] - bench.rows.tokens.starts[:-1]
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [min(int(sizes.max()), 77)] * 8
    assert batch.tokens is not None
    assert batch.tokens.shape[1] >= sizes.max()
    again = longest(bench, 80)  # of the recipe's 32
    assert again.rows.tolist() == (bench.setup.loader.batch(0).rows.tolist() * 3)[:80]
    assert again.images is not None
    assert again.images.shape == (80, 3, 64, 64)
    assert again.images.is_contiguous(memory_format=torch.channels_last)  # as the loader makes them
    assert torch.equal(again.images[40], again.images[8])
    assert again.changes is not None
    assert torch.equal(again.changes.flip[64:], again.changes.flip[:16])
    bench.setup.optimizer.register_step_post_hook(lambda *_: time.sleep(0.7))
    start = time.perf_counter()
    seconds = update(bench, batch)
    assert seconds is not None
    assert 0 < seconds < time.perf_counter() - start - 0.6
