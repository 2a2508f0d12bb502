"""Who carries out tasks: processes of this machine, or a Ray cluster."""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from pennyclip.base.errors import RequestError, RunError
from pennyclip.data.pool import TRIES, Event, Report, Result, Task, run_tasks, told

Engine = Literal["local", "ray"]

AHEAD = 2  # tasks a processor that Ray knows of. chosen: one being done, one waiting
OBJECT_STORE = 100_000_000  # bytes, of a Ray started here. chosen: tasks pass little but names


def run(
    engine: Engine,
    function: Callable[[Task, Report], Result],
    tasks: Sequence[Task],
    workers: int | None,
    preload: Sequence[str] = (),
) -> Generator[Event, None, None]:
    """Carry out tasks, and yield what happens, as `pool.run_tasks` does.

    Args:
        engine: local or ray.
        function: defined at the top of a module that every machine can import.
        tasks: given out in order.
        workers: tasks at a time; None: one a processor, of this machine or of the cluster.
        preload: modules that local processes share the import of.

    Raises:
        RequestError: there is no such engine, or Ray is not installed.
        RunError: as `pool.run_tasks`.
    """
    if engine not in get_args(Engine):
        raise RequestError(f"engine '{engine}': expected {' or '.join(get_args(Engine))}")
    if engine == "local":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return run_tasks(function, tasks, workers or cores or 1, preload)
    return _run_on_ray(function, tasks, workers)


def _run_on_ray(
    function: Callable[[Task, Report], Result], tasks: Sequence[Task], workers: int | None
) -> Generator[Event, None, None]:
    try:
        import ray
    except ImportError as error:
        raise RequestError(
            "engine 'ray' needs the package `ray`, which is not installed. Install it, here and on "
            "every machine of the cluster, with: pip install 'pennyclip[ray]'"
        ) from error
    carry_out = ray.remote(num_cpus=1, max_retries=TRIES - 1)(_carry_out)
    todo = iter(enumerate(tasks))
    flying: dict[Any, int] = {}
    with _connected(ray, workers):
        try:
            while True:
                room = workers or AHEAD * int(ray.cluster_resources().get("CPU", 1))
                while len(flying) < room and (following := next(todo, None)) is not None:
                    number, task = following
                    flying[carry_out.remote(function, task, os.getcwd())] = number
                if not flying:
                    return
                (ready,), _ = ray.wait(list(flying))
                number = flying.pop(ready)
                try:
                    counted, result = ray.get(ready)
                except ray.exceptions.RayTaskError as error:
                    raise RunError(f"{tasks[number]}: {told(error.cause)}") from error
                except ray.exceptions.RayError as error:
                    raise RunError(
                        f"{tasks[number]}: {TRIES} processes were lost on it, one after the other: "
                        f"{error} What is finished is kept: run it again."
                    ) from error
                yield "progress", number, counted
                yield "done", number, result
        finally:
            for task in flying:
                ray.cancel(task, force=True)


@contextmanager
def _connected(ray: Any, workers: int | None) -> Iterator[None]:
    """The cluster that runs already (the one RAY_ADDRESS names, or one on this machine), or one
    of this machine alone, for as long as it is needed."""
    if ray.is_initialized():  # by whoever called us
        yield
        return
    quiet = {"logging_level": "warning", "log_to_driver": False}
    try:
        ray.init("auto", **quiet)
    except ConnectionError:
        if "RAY_ADDRESS" in os.environ:
            raise RunError(
                f"no Ray cluster answers at RAY_ADDRESS={os.environ['RAY_ADDRESS']}. Start it, or "
                "unset the variable to work on this machine alone."
            ) from None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
        ray.init(
            num_cpus=workers,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            **quiet,
        )
    try:
        yield
    finally:
        ray.shutdown()


def _carry_out(function: Callable[[Any, Report], Any], task: Any, folder: str) -> tuple[int, Any]:
    """On a machine of the cluster: what a task has counted, and its result."""
    if not Path(folder).is_dir():
        raise RunError(
            f"{os.uname().nodename} has no folder {folder}. Every machine of the cluster must see "
            "the sources, the dataset and the folder of this command at the same paths."
        )
    os.chdir(folder)  # for relative paths
    counted: list[int] = []
    result = function(task, counted.append)
    return sum(counted), result
