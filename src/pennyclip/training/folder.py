"""The folder of a run: whether a request may start in it, go on in it, or is already done."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pennyclip.base.atomic import locked, partials, remove, write_text
from pennyclip.base.errors import RequestError
from pennyclip.config.file import read_toml, to_toml, to_tree
from pennyclip.config.keys import Config
from pennyclip.training.plan import Plan
from pennyclip.weights.checkpoint import Checkpoint, checkpoints


@dataclass(frozen=True)
class RunFolder:
    """A run folder that holds this run's configuration."""

    path: Path
    last: Checkpoint | None
    """What there is to go on from."""

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def done(self, steps: int) -> bool:
        """Whether the run has made all its updates."""
        return self.last is not None and self.last.step >= steps


def read_run(path: Path) -> Config:
    """The request of a run folder, to go on with it.

    Raises:
        RequestError: it is none, or its dataset is not where it was.
    """
    if not (path / "config.toml").is_file():
        raise RequestError(f"{path.absolute()} is not a run folder: it has no config.toml")
    config = read_toml(path / "config.toml")
    if config.data and not (Path(config.data) / "dataset.json").is_file():
        raise RequestError(
            f"the dataset of {path}, {config.data}, is not there, or not finished: it has no "
            f"dataset.json. If it was moved, set `data` in {path / 'config.toml'} to its new "
            "absolute path; if not, bring it back."
        )
    return config


def find_run(config: Config, out: Path) -> RunFolder:
    """Look at a folder in which a run is to begin or to go on. Nothing is written.

    Args:
        config: the resolved request, with an absolute data path.
        out: the folder, which need not exist.

    Raises:
        RequestError: the folder holds a run of another request, or something else.
    """
    if out.exists() and not out.is_dir():
        raise RequestError(
            f"{out} is a file; a run needs a folder of its own. Choose another --out."
        )
    if not (out / "config.toml").is_file():
        if out.exists() and any(out.iterdir()):
            raise RequestError(f"{out} exists and is not a run of pennyclip. Choose another --out.")
        return RunFolder(out, None)
    before, found = read_toml(out / "config.toml"), checkpoints(out)
    if not found:  # nothing was trained that another request could harm
        return RunFolder(out, None)
    if before != config:
        changed = "".join(f"\n  {line}" for line in _differences(to_tree(before), to_tree(config)))
        raise RequestError(
            f"{out} holds a run of another request. Choose another --out, or go on with the run as "
            f"it is: pennyclip train --resume {out}. Different:{changed}"
        )
    return RunFolder(out, found[-1])


@contextmanager
def cooling(path: Path, config: Config, plan: Plan) -> Iterator[Config]:
    """A run's request with its cooldown set to begin at its last checkpoint.

    The run is that request from then on, unless it is refused inside.

    Args:
        path: the run's folder.
        config: its request.
        plan: what follows from that.

    Raises:
        RequestError: it has no checkpoint or is finished; it has no cooldown, or one that has been
            set before or has begun by itself.
    """
    found = checkpoints(path)
    if not found:
        raise RequestError(f"{path} has no checkpoint from which the rate could begin to fall")
    step = found[-1].step
    if step >= plan.steps:
        again = " --optim.cooldown-from None" * (config.optim.cooldown_from is not None)
        raise RequestError(
            f"{path} is finished, after {plan.steps} updates: there is nothing left to cool down. "
            "To train on from its best checkpoint, with a course of the rate of its own: "
            f"pennyclip train {path}/config.toml --init {path} --out NEW{again}; "
            "--stages.0.epochs and the like say for how long"
        )
    if config.optim.schedule != "wsd":
        raise RequestError(
            f"the schedule of {path} is '{config.optim.schedule}': only 'wsd' has a cooldown that "
            "can be begun at any time"
        )
    if config.optim.cooldown_from is not None:
        raise RequestError(
            f"the cooldown of {path} was set to begin at update {config.optim.cooldown_from}. Go "
            f"on with: pennyclip train --resume {path}"
        )
    if step > plan.cooldown_from:
        raise RequestError(
            f"the cooldown of {path} has begun by itself, at update {plan.cooldown_from}, and it "
            f"stands at {step} of {plan.steps}. Go on with: pennyclip train --resume {path}"
        )
    changed = replace(config, optim=replace(config.optim, cooldown_from=step))
    write_text(path / "config.toml", to_toml(changed))
    try:
        yield changed
    except RequestError:
        write_text(path / "config.toml", to_toml(config))
        raise


@contextmanager
def claimed(run: RunFolder, config: Config) -> Iterator[None]:
    """Make the folder this request's, and keep others from training in it meanwhile.

    Raises:
        RequestError: another process trains in it.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    try:
        with locked(run.path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for partial in partials(run.path / "checkpoints"):
                remove(partial)  # what a killed save left
            write_text(run.path / "config.toml", to_toml(config))
            yield
    except BlockingIOError:
        raise RequestError(
            f"another process is training in {run.path}. Wait for it, or choose another --out."
        ) from None


def _differences(old: object, new: object, where: str = "") -> list[str]:
    """A line for each key in which two configurations differ, with both values."""
    if old == new:
        return []
    tables = [_table(side) for side in (old, new)]
    if all(table is None for table in tables):
        there, asked = ("unset" if side is None else repr(side) for side in (old, new))
        return [f"{where}: there {there}, asked {asked}"]
    before, after = (table or {} for table in tables)
    keys = dict.fromkeys([*before, *after])
    found = (_differences(before.get(k), after.get(k), f"{where}.{k}".lstrip(".")) for k in keys)
    return [line for lines in found for line in lines]


def _table(value: object) -> dict[str, object] | None:
    """A table, or a list of tables by their numbers; None: a single value."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return value if isinstance(value, dict) else None
