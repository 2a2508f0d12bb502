"""Preparing in this process: most tests are not about processes, which take seconds to start."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import pennyclip.prepare.work


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(
        engine: str,
        function: Callable[..., Any],
        tasks: Sequence[Any],
        workers: int | None,
        preload: Sequence[str],
    ) -> Iterator[tuple[str, int, Any]]:
        for number, task in enumerate(tasks):
            yield "done", number, function(task, lambda count: None)

    monkeypatch.setattr(pennyclip.prepare.work, "run", run)
