"""The command line: the only reader of argv. Imports torch only in a command that needs it.

Exit codes: 0 done, 1 it ran and failed, 2 the request was wrong, 130 / 143 stopped by a signal,
141 nobody reads the answer any more.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from pennyclip.base.errors import RequestError, RunError, did_you_mean
from pennyclip.commands.answer import Answer, Json, until_unread
from pennyclip.commands.bench.commands import BatchSize, Precision, Rate
from pennyclip.commands.doctor.command import Doctor
from pennyclip.commands.filter.command import Filter
from pennyclip.commands.options import (
    RESUME,
    check_options,
    check_resume,
    read_tables,
    recipe_usage,
)
from pennyclip.commands.prepare import Prepare
from pennyclip.commands.samples import Samples
from pennyclip.config.file import load_recipe
from pennyclip.config.keys import Config
from pennyclip.evaluation.task import Task
from pennyclip.training.telemetry.metrics import plain


class Command(Protocol):
    @property
    def json(self) -> bool: ...

    def run(self) -> "Answer": ...


@dataclass(frozen=True)
class Train:
    """Train a CLIP by a recipe. Every key of the recipe can be set: --optim.lr 3e-4."""

    config: Annotated[Config, arg(name="")]
    out: Path
    """The run's folder."""
    continue_: Annotated[bool, arg(name="continue")] = False
    """Go on where an unfinished run of this very request stopped, for launchers that restart."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.training.loop import train

        return _outcome(train(self.config, self.out, proceed=self.continue_))


@dataclass(frozen=True)
class Resume:
    """Go on with an unfinished run, at the sample at which its last checkpoint stands."""

    resume: Path
    """The run's folder."""
    cooldown: bool = False
    """Begin the cooldown of a `wsd` schedule now: the run ends when the rate has fallen."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.training.loop import resume

        return _outcome(resume(self.resume, cooldown=self.cooldown))


def _outcome(outcome: Any) -> Answer:
    score = outcome.best.score if outcome.best else None
    state = "finished" if outcome.finished else "stopped"
    done = "was already " if outcome.already_done else ""
    text = f"{outcome.run}: {done}{state} after {outcome.steps} updates"
    if score is not None:
        text += f"; best mean recall on the development split {score:.1%}"
        text += f" (chance {outcome.chance:.1%})" if outcome.chance is not None else ""
    elif outcome.chance is None:
        text += "; warning: nothing was held out, so nothing says how good it is"
    text += "" if outcome.finished else f". Go on with: pennyclip train --resume {outcome.run}"
    tree = {
        "run": str(outcome.run),
        "steps": outcome.steps,
        "finished": outcome.finished,
        "best": {"path": str(outcome.best.path), "score": score} if outcome.best else None,
        "chance": outcome.chance,
    }
    return Answer(text, tree, outcome.exit_code)


@dataclass(frozen=True)
class Retrieval:
    """Find each picture by its captions and each caption by its picture."""

    run_: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run's folder, or a checkpoint's."""
    data: Path
    """The prepared dataset."""
    split: str = "val"
    """Subset of the dataset."""
    checkpoint: str = "best"
    """best, last or a step; ema, ema:last or ema:STEP for averaged weights."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.commands.evaluate import evaluate_retrieval

        return _result(evaluate_retrieval(self.run_, self.data, self.split, self.checkpoint))


@dataclass(frozen=True)
class Zeroshot:
    """Classify pictures by the names of their classes."""

    run_: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run's folder, or a checkpoint's."""
    images: Path
    """A folder with one folder a class, named as the class."""
    checkpoint: str = "best"
    """best, last or a step; ema, ema:last or ema:STEP for averaged weights."""
    classes: Path | None = None
    """JSON object from folder name to class name, where they differ."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.commands.evaluate import evaluate_zeroshot

        return _result(evaluate_zeroshot(self.run_, self.images, self.checkpoint, self.classes))


def _result(result: Any) -> Answer:
    from pennyclip.evaluation.result import COUNTS

    width = max(map(len, result.metrics))
    lines = []
    for name, value in result.metrics.items():
        guess = result.chance.get(name)
        lines.append(
            f"{name:<{width}}  {value:{'.0f' if name in COUNTS else '.4f'}}"
            + (f"  chance {guess:.4f}" if guess is not None else "")
        )
    return Answer("\n".join([*lines, *result.notes]), vars(result))


@dataclass(frozen=True)
class Report:
    """A self-contained page about a run, several side by side, or a dataset."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...] | DATASET")]
    """Folders of runs, or that of a dataset."""
    out: Path | None = None
    """The page; unset: report.html in the folder, comparison.html for several runs."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.reporting import write_comparison, write_dataset_page, write_report

        if len(self.runs) == 1 and (self.runs[0] / "dataset.json").is_file():
            page = write_dataset_page(self.runs[0], self.out)
        elif len(self.runs) == 1:
            page = write_report(self.runs[0], self.out)
        else:
            page = write_comparison(list(self.runs), self.out or Path("comparison.html"))
        return Answer(f"report: {page}", {"report": str(page)})


@dataclass(frozen=True)
class Search:
    """Find a dataset's pictures by text."""

    run_: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run's folder, or a checkpoint's."""
    query: Positional[str]
    data: Path
    """The prepared dataset."""
    subset: str | None = None
    """Which of its rows; unset: all."""
    top: int = 5
    """How many pictures."""
    checkpoint: str = "best"
    """best, last or a step; ema, ema:last or ema:STEP for averaged weights."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.commands.search import search

        hits = search(
            self.run_,
            self.data,
            self.query,
            subset=self.subset,
            top=self.top,
            checkpoint=self.checkpoint,
        )
        lines = [f"{h.score:.3f}  {h.image}  {h.captions[0][:80]}" for h in hits]
        return Answer("\n".join(lines), {"hits": [dataclasses.asdict(h) for h in hits]})


@dataclass(frozen=True)
class Export:
    """A run's model in a form that other tools load, with a model card."""

    run_: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run's folder, or a checkpoint's."""
    to: Literal["open_clip", "hf", "onnx"]
    """For open_clip's local-dir:, for transformers, or both towers as ONNX."""
    out: Path
    """The folder."""
    checkpoint: str = "best"
    """best, last or a step; ema, ema:last or ema:STEP for averaged weights."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.commands.export import export

        made = export(self.run_, self.to, self.out, self.checkpoint)
        lines = [f"{made.path}: {made.layout}", *made.notes, f"load it with: {made.load_line}"]
        tree = dataclasses.asdict(made) | {"path": str(made.path)}
        return Answer("\n".join(lines), json.loads(json.dumps(tree, default=str)))


@dataclass(frozen=True)
class Interpolate:
    """The model between a run's start and end that keeps most of both tasks (WiSE-FT)."""

    run_: Annotated[Positional[Path], arg(metavar="RUN")]
    """The end: a run's folder, or a checkpoint's."""
    out: Path
    """The checkpoint folder to make."""
    task: Task = field(default_factory=Task)
    """What the run was for."""
    reference: Task = field(default_factory=Task)
    """What it should not forget."""
    start: Path | None = None
    """A run or checkpoint to begin at; unset: what the run started from."""
    alphas: tuple[float, ...] = tuple(i / 10 for i in range(11))
    """Where models are scored: 0 is the start, 1 the end; unset: the paper's steps of 0.1."""
    alpha: float | None = None
    """Write this one, whatever the scores; unset: that with the largest mean of both."""
    checkpoint: str = "best"
    """best, last or a step; ema, ema:last or ema:STEP for averaged weights."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.commands.interpolate.runs import interpolate_run

        options = {k: v for k, v in vars(self).items() if k not in ("run_", "json")}
        made = interpolate_run(self.run_, **options)
        tree = dataclasses.asdict(made) | {"path": str(made.path)}
        return Answer(str(made), tree)


@dataclass(frozen=True)
class Weights:
    """Whether a weights file fits a tower: every key and every parameter accounted for."""

    file: Positional[str]
    """A file or folder, package:NAME or hub:ORG/NAME."""
    tower: str
    """A timm model, clip-text, or a transformers encoder's folder, package: or hub: name."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.weights.inspection import inspect_weights

        text, tree = inspect_weights(self.file, self.tower)
        return Answer(text, tree, 0 if tree["fits"] else 2)


@dataclass(frozen=True)
class List:
    """Name what a recipe can use."""

    what: Positional[str]
    """recipes, towers, losses, optimizers or presets."""
    name: Positional[str] = ""
    """Of a recipe: print it, as the start of one of your own."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.commands.listing import listing, recipe_text

        if self.name:
            text = recipe_text(self.what, self.name)
            return Answer(text.rstrip("\n"), {self.what: {self.name: text}})
        names = listing(self.what)
        lines = [f"{name:<28} {about}".rstrip() for name, about in names.items()]
        return Answer("\n".join(lines), {self.what: names})


COMMANDS: dict[str, type[Any]] = {
    "prepare": Prepare,
    "samples": Samples,
    "train": Train,
    "eval retrieval": Retrieval,
    "eval zeroshot": Zeroshot,
    "filter": Filter,
    "report": Report,
    "search": Search,
    "bench batch-size": BatchSize,
    "bench precision": Precision,
    "bench rate": Rate,
    "doctor": Doctor,
    "export": Export,
    "interpolate": Interpolate,
    "weights": Weights,
    "list": List,
}


GROUPS: list[list[str]] = [[], ["eval"], ["bench"]]
HELP = [[*group, flag] for group in GROUPS for flag in ("-h", "--help")]
"""Where there is no single command whose help tyro could print."""


def usage() -> str:
    lines = ["usage: pennyclip COMMAND ...   (pennyclip COMMAND --help says more)", ""]
    lines += [f"  {name:<16} {(kind.__doc__ or '').strip()}" for name, kind in COMMANDS.items()]
    return "\n".join(lines)


@until_unread()
def parse(argv: Sequence[str]) -> Command:
    """The command that the arguments describe.

    Raises:
        RequestError: there is no such command, or no such recipe.
        SystemExit: tyro printed help (0) or refused an argument (2).
    """
    name = next((n for n in COMMANDS if list(argv[: len(n.split())]) == n.split()), None)
    if name is None:
        asked = " ".join(argv[: 2 if list(argv[:1]) in GROUPS else 1])
        raise RequestError(f"no command '{asked}'.{did_you_mean(asked, COMMANDS)}\n\n{usage()}")
    rest = list(argv[len(name.split()) :])
    kind, program = COMMANDS[name], f"pennyclip {name}"
    fields = dataclasses.fields(kind)
    if "config" not in [field.name for field in fields]:
        return tyro.cli(kind, prog=program, args=rest, description=kind.__doc__)
    if name == "train" and any(item.split("=")[0] == "--resume" for item in rest):
        check_resume(rest)
        return tyro.cli(Resume, prog=program, args=rest)
    if not rest or rest[0].startswith("-"):
        if rest and rest[0] in ("-h", "--help"):
            print(recipe_usage(name))
            raise SystemExit(0)
        raise RequestError(recipe_usage(name))
    required = {
        field.name: tyro.MISSING for field in fields if field.default is dataclasses.MISSING
    }
    recipe, *rest = rest
    config, rest = read_tables(load_recipe(recipe), rest)
    check_options(config, ["help", *(field.name.rstrip("_") for field in fields)], rest)
    return tyro.cli(
        kind,
        prog=f"{program} {recipe}",
        args=rest,
        description=f"{kind.__doc__} {RESUME}" if name == "train" else kind.__doc__,
        default=kind(**required | {"config": config}),
        config=(tyro.conf.AvoidSubcommands,),
    )


@until_unread()
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or list(argv) in HELP:
        print(usage())
        return 0 if argv else 2
    try:
        command = parse(argv)
        answer = command.run()
    except SystemExit as refused:  # tyro has printed why, or the help
        if "--json" in argv and refused.code:
            print(json.dumps({"error": "the arguments were refused; standard error says why"}))
        raise
    except (RequestError, RunError, OSError) as error:
        Console(stderr=True).print(
            f"pennyclip: {error}", markup=False, highlight=False, soft_wrap=True
        )
        if "--json" in argv:
            print(json.dumps({"error": str(error)}))
        return 2 if isinstance(error, RequestError) else 1
    except KeyboardInterrupt:
        if "--json" in argv:
            print(json.dumps({"error": "stopped by Ctrl-C"}))
        return 130
    print(json.dumps(plain(answer.tree), allow_nan=False) if command.json else answer.text)
    return answer.exit_code


if __name__ == "__main__":
    sys.exit(main())
