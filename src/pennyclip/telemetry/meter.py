"""Times a run and turns an update's metrics into a line of metrics.jsonl."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Meter:
    """Measures between two readings: samples a second, share of the time spent waiting for data.

    A reading asks for the metrics' values, and so waits for the device: its times are true.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._restart()

    def _restart(self) -> None:
        self._start = time.perf_counter()
        self._waited = self._excluded = 0.0
        self._batches = 0
        self._clipped: list[torch.Tensor] = []

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """Pass batches on, counting the time until each is there."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waited += time.perf_counter() - start
            yield batch

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
        """The last update's metrics as plain numbers, with the rates since the last reading."""
        plain = {
            key: value.item() if torch.is_tensor(value) else value for key, value in record.items()
        }
        seconds = time.perf_counter() - self._start - self._excluded
        samples = step * self._batch_size
        plain |= {
            "samples": samples,
            "epoch": samples / rows,
            "clipped": torch.stack(self._clipped).float().mean().item() if self._clipped else 0.0,
            "samples_per_second": self._batches * self._batch_size / seconds,
            "input_wait": self._waited / seconds,
        }
        self._restart()
        return plain
