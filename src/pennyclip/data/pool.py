"""Tasks carried out in processes, one at a time each, by whoever is free.

Unlike the standard library's pools it gives the task of a killed process to another, and says which
task it was if that one dies, too; it passes progress on while a task runs, and leaves no process
behind when this one is killed.
"""

import multiprocessing
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Literal, TypeAlias, TypeVar, cast

from pennyclip.base.errors import RunError

Task = TypeVar("Task")
Result = TypeVar("Result")
Report = Callable[[int], None]
Event = tuple[Literal["progress", "done", "killed"], int, Any]

TRIES = 3  # of a task whose process is killed. chosen: what kills three is no accident
Pipe: TypeAlias = "Connection[Any, Any]"


def run_tasks(
    function: Callable[[Task, Report], Result],
    tasks: Sequence[Task],
    workers: int,
    preload: Sequence[str] = (),
) -> Generator[Event, None, None]:
    """Call `function(task, report)` for each task; yield what happens as it happens.

    Args:
        function: defined at the top of a module, for another process to find.
        tasks: given out in order.
        workers: number of processes.
        preload: modules that the processes share the import of, beside the function's own.

    Yields:
        ("progress", task number, n) when the function calls report(n); ("done", task number,
        result); and ("killed", task number, how) when its process is lost and another begins it
        anew: then a negative n takes back what the first had reported.

    Raises:
        RunError: the function raised, or a task's processes were killed `TRIES` times; the task is
            named.
    """
    # Forked from a fresh process that has imported these modules and started nothing.
    forkserver = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forkserver else "spawn")
    if forkserver:
        context.set_forkserver_preload([function.__module__, *preload])
    crew: dict[Pipe, tuple[Any, int]] = {}
    todo = iter(enumerate(tasks))
    reported, tries = Counter[int](), Counter[int]()

    def start(number: int) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(function, theirs), daemon=True)
        with _no_main_module():
            process.start()
        theirs.close()  # so that its death is seen as the end of the pipe
        crew[ours] = (process, number)
        give(ours, tasks[number])

    def give(pipe: Pipe, task: Task) -> None:
        with suppress(ConnectionError):  # killed just now: the end of the pipe will say so
            pipe.send(task)

    try:
        for number, _ in (next(todo) for _ in range(min(workers, len(tasks)))):
            start(number)
        while crew:
            for ready in wait(list(crew)):
                pipe = cast(Pipe, ready)
                process, number = crew[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionError):
                    process.join()
                    tries[number] += 1
                    if tries[number] == TRIES:
                        raise RunError(_death(process.exitcode, tasks[number])) from None
                    yield "killed", number, _how(process.exitcode)
                    yield "progress", number, -reported.pop(number, 0)
                    del crew[pipe]
                    pipe.close()
                    start(number)
                    continue
                if kind == "failed":
                    raise RunError(f"{tasks[number]}: {value}")
                yield kind, number, value
                if kind == "progress":
                    reported[number] += value
                    continue
                following = next(todo, None)
                if following is not None:
                    crew[pipe] = (process, following[0])
                    give(pipe, following[1])
                else:
                    del crew[pipe]
                    pipe.close()  # the end of the pipe is the end of its process
                    process.join()
    finally:
        for pipe, (process, _) in crew.items():
            process.terminate()
            process.join()
            pipe.close()


@contextmanager
def _no_main_module() -> Iterator[None]:
    """A new process imports its parent's main module. Ours need nothing of it, and a script that
    calls us at its top level would run again in each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _death(code: int | None, task: object) -> str:
    hint = ""
    if code == -signal.SIGKILL:
        hint = " Often that is a machine out of memory: try fewer workers."
    return (
        f"{task}: {TRIES} processes were lost on it, one after the other; the last {_how(code)}."
        f"{hint} What is finished is kept: run it again."
    )


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _serve(function: Callable[[Any, Report], Any], pipe: Pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the first process, which decides
    with suppress(EOFError, ConnectionError):  # no more tasks, or the first process is gone
        while True:
            task = pipe.recv()
            try:
                result = function(task, lambda count: pipe.send(("progress", count)))
            except Exception as error:
                pipe.send(("failed", told(error)))
                return
            pipe.send(("done", result))


def told(error: BaseException) -> str:
    """What a task's failure says. A full disk is no fault of ours; elsewhere, the place helps."""
    if isinstance(error, OSError):
        return f"{error}. What is finished is kept: run it again when the cause is gone."
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({frame.filename}, line {frame.lineno})" for frame in where)
    return f"{type(error).__name__}: {error}{place}"
