"""Preparing on Ray: the same bytes as in processes of this machine, whoever is killed."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from pennyclip.base.errors import RequestError, RunError
from pennyclip.data import engines
from pennyclip.data.index import Dataset
from pennyclip.data.prepare import prepare, work
from pennyclip.data.shards import ShardTask, make_shard


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Any:
    """One Ray for all tests here: starting one takes seconds."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=10**8,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},  # for this module
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pictures(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray") / "pictures"
    folder.mkdir()
    dataset = Dataset(small_dataset)
    for row in range(24):
        (folder / f"{row}.jpg").write_bytes(dataset.image_bytes(row))
        (folder / f"{row}.txt").write_text("\n".join(dataset.captions(row)))
    (folder / "24.jpg").write_bytes(b"no picture")
    (folder / "24.txt").write_text("refused")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def local(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("local") / "out"
    prepare([str(pictures)], out, shard_size=5, workers=2, quiet=True)
    return content(out)


def test_both_engines_write_the_same_bytes(
    pictures: Path, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a relative path means the same on every machine
    prepare([str(pictures)], "out", shard_size=5, engine="ray", quiet=True)
    assert content(tmp_path / "out") == local
    assert len([name for name in local if name.endswith(".tar")]) == 5


def killed_once(task: tuple[ShardTask, Path], report: Callable[[int], None]) -> Any:
    """Makes a shard; the process that makes shard 2 is killed in the middle, the first time."""
    shard, mark = task
    if shard.number == 2 and not mark.exists():
        mark.touch()
        make_shard(shard, lambda count: os.kill(os.getpid(), signal.SIGKILL))
    return make_shard(shard, report)


@pytest.mark.parametrize("engine", ["ray", "local"])
def test_a_killed_worker_costs_its_shard_and_no_other(
    engine: engines.Engine,
    pictures: Path,
    local: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`prepare` finishes in one go, with the same bytes."""
    mark = tmp_path / "killed"

    def run(
        engine: engines.Engine, function: Any, tasks: list[ShardTask], *rest: Any, **more: Any
    ) -> Any:
        return engines.run(engine, killed_once, [(task, mark) for task in tasks], *rest, **more)

    monkeypatch.setattr(work, "run", run)
    prepare([str(pictures)], tmp_path / "out", shard_size=5, engine=engine, workers=2, quiet=True)
    assert mark.exists()
    assert content(tmp_path / "out") == local


def fails_at_three(task: int, report: Callable[[int], None]) -> int:
    if task == 3:
        raise OSError(28, "No space left on device")
    report(2)
    return task


def dies(task: int, report: Callable[[int], None]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def sleeps(task: int, report: Callable[[int], None]) -> int:
    time.sleep(0.05)
    return task


def test_what_ray_tells() -> None:
    events = list(engines.run("ray", sleeps, range(7), None))
    assert sorted(value for kind, _, value in events if kind == "done") == list(range(7))
    with pytest.raises(RunError, match=r"^3: .*No space left on device.*run it again"):
        list(engines.run("ray", fails_at_three, range(5), 1))
    with pytest.raises(RunError, match="0: 3 processes were lost on it"):
        list(engines.run("ray", dies, range(1), 1))
    with pytest.raises(RequestError, match="engine 'dask': expected local or ray"):
        list(engines.run("dask", sleeps, range(1), 1))


def test_a_machine_that_does_not_see_the_folder_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "elsewhere"))
    with pytest.raises(RunError, match=r"has no folder .*elsewhere.* at the same paths"):
        list(engines.run("ray", sleeps, range(1), 1))
