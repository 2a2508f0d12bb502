import os
import signal
import time
from collections.abc import Callable

import pytest

from pennyclip.data.pool import run_tasks
from pennyclip.errors import RunError


def square(task: int, report: Callable[[int], None]) -> int:
    report(task)
    return task * task


def fail_at_three(task: int, report: Callable[[int], None]) -> int:
    if task == 3:
        raise OSError(28, "No space left on device")
    return task


def die_at_three(task: int, report: Callable[[int], None]) -> int:
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return task


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_every_task_is_done_once(workers: int) -> None:
    events = list(run_tasks(square, [3, 1, 4, 1, 5], workers))
    done = {number: value for kind, number, value in events if kind == "done"}
    assert done == {0: 9, 1: 1, 2: 16, 3: 1, 4: 25}
    assert sum(value for kind, _, value in events if kind == "progress") == 14
    assert list(run_tasks(square, [], workers)) == []


def test_an_exception_names_the_task() -> None:
    with pytest.raises(RunError, match=r"3: OSError: .*No space left on device"):
        list(run_tasks(fail_at_three, range(5), 2))


def test_a_killed_process_names_its_task_and_does_not_hang() -> None:
    with pytest.raises(RunError, match="3: the process working on it was killed by SIGKILL"):
        list(run_tasks(die_at_three, range(50), 2))
