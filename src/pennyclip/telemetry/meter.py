"""Times a run and turns an update's metrics into a line of metrics.jsonl."""

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Meter:
    """Measures between two readings: samples a second, share of the time spent waiting for data.

    A reading asks for the metrics' values, and so waits for the device: its times are true.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._first = time.perf_counter()
        self._restart()

    def _restart(self) -> None:
        self._start = time.perf_counter()
        self._waited = 0.0
        self._updates = 0
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

    def count(self, grad_norm: torch.Tensor, clip_norm: float) -> None:
        """An update was made."""
        self._updates += 1
        self._clipped.append(grad_norm > clip_norm)

    def read(self, record: dict[str, Any], step: int, rows: int) -> dict[str, Any]:
        """The last update's metrics as plain numbers, with the rates since the last reading."""
        plain = {
            key: value.item() if torch.is_tensor(value) else value for key, value in record.items()
        }
        now = time.perf_counter()
        samples = step * self._batch_size
        plain |= {
            "samples": samples,
            "epoch": samples / rows,
            "clipped": torch.stack(self._clipped).float().mean().item(),
            "samples_per_second": self._updates * self._batch_size / (now - self._start),
            "input_wait": self._waited / (now - self._start),
            "seconds": now - self._first,
        }
        self._restart()
        return plain
