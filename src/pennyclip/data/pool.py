"""Tasks carried out in processes, one at a time each, by whoever is free.

Unlike the standard library's pools it says which task a process died of, passes progress on while
a task runs, and leaves no process behind when this one is killed.
"""

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Literal, TypeAlias, TypeVar, cast

from pennyclip.errors import RunError

Task = TypeVar("Task")
Result = TypeVar("Result")
Report = Callable[[int], None]
Event = tuple[Literal["progress", "done"], int, Any]
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
        ("progress", task number, n) when the function calls report(n), and
        ("done", task number, result).

    Raises:
        RunError: the function raised, or its process was killed; the task is named.
    """
    # Forked from a fresh process that has imported these modules and started nothing.
    forkserver = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forkserver else "spawn")
    if forkserver:
        context.set_forkserver_preload([function.__module__, *preload])
    crew: dict[Pipe, tuple[Any, int]] = {}
    todo = iter(enumerate(tasks))
    try:
        for number, task in (next(todo) for _ in range(min(workers, len(tasks)))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(function, theirs), daemon=True)
            with _no_main_module():
                process.start()
            theirs.close()  # so that its death is seen as the end of the pipe
            ours.send(task)
            crew[ours] = (process, number)
        while crew:
            for ready in wait(list(crew)):
                pipe = cast("Pipe", ready)
                process, number = crew[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionError):
                    process.join()
                    raise RunError(_death(process.exitcode, tasks[number])) from None
                if kind == "failed":
                    raise RunError(f"{tasks[number]}: {value}")
                yield kind, number, value
                if kind == "done":
                    following = next(todo, None)
                    if following is not None:
                        pipe.send(following[1])
                        crew[pipe] = (process, following[0])
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
    how = f"ended with exit code {code}"
    hint = ""
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            hint = " Often that is a machine out of memory: try fewer workers."
    return f"{task}: the process working on it {how}.{hint} What is finished is kept: run it again."


def _serve(function: Callable[[Any, Report], Any], pipe: "Pipe") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the first process, which decides
    try:
        while True:
            task = pipe.recv()
            pipe.send(("done", function(task, lambda count: pipe.send(("progress", count)))))
    except (EOFError, ConnectionError):  # no more tasks, or the first process is gone
        return
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.filename}, line {where.lineno})"
        pipe.send(("failed", text))
