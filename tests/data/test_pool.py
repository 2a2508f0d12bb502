import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pennyclip.base.errors import RunError
from pennyclip.data.pool import run_tasks


def square(task: int, report: Callable[[int], None]) -> int:
    report(task)
    return task * task


def fail_at_three(task: int, report: Callable[[int], None]) -> int:
    if task == 3:
        raise OSError(28, "No space left on device")
    return task


def end_at_three(task: int, report: Callable[[int], None]) -> int:
    if task == 3:
        raise EOFError("nothing more to read")
    return task


def abort_at_three(task: int, report: Callable[[int], None]) -> int:
    if task == 3:
        raise ConnectionAbortedError(103, "Software caused connection abort")
    return task


def die_at_three(task: int, report: Callable[[int], None]) -> int:
    if task == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return task


def die_once_at_three(task: tuple[int, Path], report: Callable[[int], None]) -> int:
    number, folder = task
    first = not list(folder.glob("3-*"))
    (folder / f"{number}-{os.getpid()}").touch()
    report(1)
    if number == 3 and first:
        time.sleep(0.05)  # until the report has been read
        os.kill(os.getpid(), signal.SIGKILL)
    report(1)
    return number


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_every_task_is_done_once(workers: int) -> None:
    events = list(run_tasks(square, [3, 1, 4, 1, 5], workers))
    done = {number: value for kind, number, value in events if kind == "done"}
    assert done == {0: 9, 1: 1, 2: 16, 3: 1, 4: 25}
    assert sum(value for kind, _, value in events if kind == "progress") == 14
    assert list(run_tasks(square, [], workers)) == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fail_at_three, r"^3: .*No space left on device.*run it again"),
        (end_at_three, r"^3: EOFError: nothing more to read \(.*test_pool\.py, line \d+\)"),
        (abort_at_three, r"^3: .*connection abort.*run it again"),  # as a network's disk may say
    ],
)
def test_an_exception_names_the_task(function: Callable[..., int], message: str) -> None:
    with pytest.raises(RunError, match=message):
        list(run_tasks(function, range(5), 2))


def test_what_kills_every_process_names_its_task_and_does_not_hang() -> None:
    with pytest.raises(RunError, match=r"3: 3 processes were lost on it.* killed by SIGKILL"):
        list(run_tasks(die_at_three, range(50), 2))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_killed_process_costs_its_task_and_no_other(workers: int, tmp_path: Path) -> None:
    """Its task is begun anew, by one more process; what it had reported is taken back."""
    tasks = [(number, tmp_path) for number in range(8)]
    events = list(run_tasks(die_once_at_three, tasks, workers))
    assert {number: value for kind, number, value in events if kind == "done"} == {
        number: number for number in range(8)
    }
    assert [e for e in events if e[0] == "killed"] == [("killed", 3, "was killed by SIGKILL")]
    assert sum(value for kind, _, value in events if kind == "progress") == 8 * 2
    calls = sorted(file.name.split("-")[0] for file in tmp_path.iterdir())
    assert calls == ["0", "1", "2", "3", "3", "4", "5", "6", "7"]
    processes = {file.name.split("-")[1] for file in tmp_path.iterdir()}
    assert len(processes) <= workers + 1
