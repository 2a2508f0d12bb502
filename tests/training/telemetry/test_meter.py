"""Times: what counts as waiting for data, and what does not. By a clock of its own."""

from collections.abc import Iterator

import pytest
import torch

from pennyclip.training.telemetry import meter as module
from pennyclip.training.telemetry.meter import Meter

RECORD = {"skipped": None, "grad_norm": 2.0}


class Clock:
    """Seconds that pass only when told; and a GPU that works on by itself."""

    now = 0.0
    gpu_free = 0.0

    def perf_counter(self) -> float:
        return self.now

    def batches(self, seconds: float) -> Iterator[int]:
        for number in range(4):
            self.now += seconds
            yield number

    def event(self, enable_timing: bool) -> "Mark":
        assert enable_timing
        return Mark(self)


class Mark:
    """Passes when all that the GPU was given before is done."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.passed = max(self.clock.now, self.clock.gpu_free)

    def elapsed_time(self, end: "Mark") -> float:
        return 1000 * (end.passed - self.passed)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    return clock


def test_the_share_of_the_time_spent_waiting(clock: Clock) -> None:
    """A batch waits for 3 s and works for 5; evaluation does not count."""
    meter = Meter(8, torch.device("cpu"))
    for _ in meter.waiting(clock.batches(3)):
        clock.now += 5
        meter.count(RECORD, clip_norm=1.0)
        with meter.excluded():
            clock.now += 100
    found = meter.read({"loss": 1.0}, step=4, rows=16)
    assert found == {
        "loss": 1.0,
        "samples": 32,
        "epoch": 2.0,
        "clipped": 1.0,
        "samples_per_second": 1.0,
        "input_wait": 3 / 8,
    }
    clock.now += 1
    assert meter.read({}, step=4, rows=16)["input_wait"] == 0


@pytest.mark.parametrize(("busy", "waited"), [(0, 12), (2, 4), (3, 0), (50, 0)])
def test_a_gpu_that_is_still_busy_does_not_wait(busy: float, waited: float, clock: Clock) -> None:
    """The host waits 3 s for each of 4 batches; each update keeps the GPU busy for a while."""
    meter = Meter(8, torch.device("cuda"))
    clock.gpu_free = busy
    for _ in meter.waiting(clock.batches(3)):
        clock.gpu_free = max(clock.now, clock.gpu_free) + busy
    seconds = clock.now
    assert meter.read({}, step=4, rows=16)["input_wait"] == pytest.approx(waited / seconds)
