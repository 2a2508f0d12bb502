"""Times a run and turns an update's metrics into a line of metrics.jsonl."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Meter:
    """Measures between two readings: samples a second, share of the time spent waiting for data.

    Each update waits for the device once, so over several of them the times are true.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self._batch_size = batch_size
        self._device = device
        self._restart()

    def _restart(self) -> None:
        self._start = time.perf_counter()
        self._excluded = 0.0
        self._waits: list[tuple[Any, Any]] = []
        self._batches = 0
        self._clipped: list[bool] = []

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """Pass batches on, and take the time for which the device stands still until each is there.

        A GPU may still be busy with the last update while its host waits already. So the time is
        taken on the GPU: between two marks in its own queue, one before the wait and one behind.
        """
        iterator = iter(batches)
        while True:
            began = self._now()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waits.append((began, self._now()))
            yield batch

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    def _waited(self) -> float:
        """Seconds; on a GPU, the updates since have waited for all the marks to pass."""
        if self._device.type != "cuda":
            return float(sum(end - began for began, end in self._waits))
        return sum(began.elapsed_time(end) for began, end in self._waits) / 1000

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time spent inside (evaluating, saving) is not the training's."""
        start = time.perf_counter()
        yield
        self._excluded += time.perf_counter() - start

    def count(self, record: dict[str, Any], clip_norm: float) -> None:
        """A batch was seen, and an update made from it unless it was skipped."""
        self._batches += 1
        if not record["skipped"]:
            self._clipped.append(record["grad_norm"] > clip_norm)

    def read(self, record: dict[str, Any], step: int, rows: int) -> dict[str, Any]:
        """The last update's metrics, with the rates since the last reading."""
        plain = dict(record)
        seconds = time.perf_counter() - self._start - self._excluded
        samples = step * self._batch_size
        plain |= {
            "samples": samples,
            "epoch": samples / rows,
            "clipped": sum(self._clipped) / max(1, len(self._clipped)),
            "samples_per_second": self._batches * self._batch_size / seconds,
            "input_wait": self._waited() / seconds,
        }
        self._restart()
        return plain
