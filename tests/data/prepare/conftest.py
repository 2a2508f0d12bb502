"""Preparing in this process: most tests are not about processes, which take seconds to start."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from PIL import Image

import pennyclip.data.prepare.work


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # a shard sets both

    def run(
        engine: str,
        function: Callable[..., Any],
        tasks: Sequence[Any],
        workers: int | None,
        preload: Sequence[str],
    ) -> Iterator[tuple[str, int, Any]]:
        for number, task in enumerate(tasks):
            yield "done", number, function(task, lambda count: None)

    monkeypatch.setattr(pennyclip.data.prepare.work, "run", run)
    yield
    torch.set_num_threads(threads)
