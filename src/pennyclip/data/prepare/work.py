"""The tasks of a dataset carried out, each once; and an early end where the sources are bad."""

import sys
from contextlib import closing
from typing import Any

from pennyclip.base.atomic import remove
from pennyclip.base.errors import RunError
from pennyclip.base.progress import Counter as ProgressCounter
from pennyclip.data.engines import Engine, run
from pennyclip.data.shards import ShardTask, make_shard

PATIENCE = 1000  # inputs before "more than half are refused" stops a run. chosen: a shard's worth


class Refused(RunError):
    """So much was refused that something is wrong with the sources as a whole."""


def make_shards(tasks: list[ShardTask], engine: Engine, workers: int | None, quiet: bool) -> None:
    """Carry out the tasks that are not done.

    Raises:
        Refused: of all inputs, or of the first `PATIENCE`, most were refused. Nothing is kept.
        RunError: a task failed.
    """
    done = {task.number: found for task in tasks if (found := task.made()) is not None}
    todo = [task for task in tasks if task.number not in done]
    first = -(-PATIENCE // len(tasks[0].items))  # shards that show whether the sources are sound
    total = sum(len(task.items) for task in tasks)
    trouble = None
    with (
        ProgressCounter("prepare", total, quiet) as progress,
        closing(run(engine, make_shard, todo, workers, preload=["torch"])) as events,
    ):
        progress.skip(sum(found["inputs"] for found in done.values()))
        for kind, number, value in events:
            if kind == "progress":
                refused = sum(len(found["rejects"]) for found in done.values())
                progress.add(value, f", {refused:,} refused" if refused else "")
                continue
            if kind == "killed":
                print(f"{todo[number]} begins anew: its process {value}", file=sys.stderr)
                continue
            done[todo[number].number] = value
            if todo[number].number < first and all(n in done for n in range(first)):
                trouble = _systematic([done[n] for n in range(first)])
                if trouble is not None:
                    break
    if trouble is None:
        trouble = _systematic([done[task.number] for task in tasks])
    if trouble is not None:
        for task in tasks:
            for file in (task.manifest, task.index, task.tar, task.raw):
                remove(file)
        raise Refused(f"{trouble} Nothing of it is kept: correct the cause and run it again.")


def _systematic(manifests: list[dict[str, Any]]) -> str | None:
    """What is wrong with the sources as a whole, if most is refused; better than a long list."""
    inputs = sum(found["inputs"] for found in manifests)
    rejects = [reject for found in manifests for reject in found["rejects"]]
    if len(rejects) < inputs and (inputs < PATIENCE or len(rejects) <= inputs / 2):
        return None
    why = rejects[0]
    return (
        f"{len(rejects):,} of {inputs:,} inputs were refused, so something is wrong with all of "
        f"them. The first: {why['origin']}, {why['key']}: {why['reason']}."
    )
