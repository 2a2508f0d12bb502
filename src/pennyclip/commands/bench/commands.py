"""The `bench` commands: their arguments."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from pennyclip.base.errors import RequestError
from pennyclip.commands.answer import Answer, Json
from pennyclip.config.keys import Config


@dataclass(frozen=True)
class BatchSize:
    """The largest batch that fits into memory, and the fastest micro-batch, both measured."""

    config: Annotated[Config, arg(name="")]
    stage: int | None = None
    """Which stage of the recipe, from 1; unset: the last."""
    up_to: int | None = None
    """Largest batch to try; unset: all rows to train on, as far as memory and 20 seconds an update
    allow."""
    rounds: int = 3
    """Timed updates of each size, in turns."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.commands.bench.batch_size import measure_batch_sizes

        found = measure_batch_sizes(
            self.config, stage=self.stage, up_to=self.up_to, rounds=self.rounds
        )
        return Answer(str(found), dataclasses.asdict(found) | {"advice": found.advice})


@dataclass(frozen=True)
class Precision:
    """Precisions side by side: time, memory, largest batch, accuracy; or the errors of one."""

    config: Annotated[Config, arg(name="")]
    errors: bool = False
    """Compare each module with float32, in the recipe's precision (one of 16 bits where that is
    fp32), on one real batch."""
    among: tuple[str, ...] = ()
    """Which ones, such as fp32 bf16 pure-bf16-stochastic; unset: all that the device has, on CPUs
    not the slow fp16."""
    stage: int | None = None
    """Which stage of the recipe, from 1; unset: the first, for errors the last."""
    epochs: float = 1.0
    """Length of each precision's run."""
    up_to: int | None = None
    """Largest batch to try; unset: all rows to train on, as far as memory and 20 seconds an update
    allow."""
    out: Path | None = None
    """A folder for the table as a page, and for the runs; unset: nothing is kept."""
    json: Json = False

    def run(self) -> Answer:
        if self.errors:
            unused = [name for name in ("among", "up_to", "out") if getattr(self, name)]
            unused += ["epochs"] * (self.epochs != Precision.epochs)
            if unused:
                raise RequestError(
                    f"--{unused[0].replace('_', '-')} belongs to the table of precisions, and "
                    "--errors looks at a single one, --precision. Leave one of the two out."
                )
            from pennyclip.commands.bench.module_errors import measure_module_errors

            errors = measure_module_errors(self.config, self.stage)
            return Answer(str(errors), dataclasses.asdict(errors) | {"keep": errors.keep})
        from pennyclip.commands.bench.precision import measure_precisions
        from pennyclip.commands.bench.precision_page import write_precision_page

        found = measure_precisions(
            self.config,
            among=self.among,
            stage=self.stage,
            epochs=self.epochs,
            up_to=self.up_to,
            runs=self.out,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        text, tree = str(found), dataclasses.asdict(found)
        if self.out is not None:
            page = write_precision_page(found, self.out / "precision.html")
            text, tree = f"{text}\n\npage: {page}", tree | {"page": str(page)}
        return Answer(text, tree)


@dataclass(frozen=True)
class Rate:
    """A peak learning rate for this recipe and data, from a range test (Smith 2017)."""

    config: Annotated[Config, arg(name="")]
    stage: int | None = None
    """Which stage of the recipe, from 1; unset: the first. Its weights are those of the start."""
    updates: int = 100
    """Updates from a thousandth of the recipe's rates to a hundred times them."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.commands.bench.rate import find_rate

        found = find_rate(self.config, stage=self.stage, updates=self.updates)
        return Answer(str(found), dataclasses.asdict(found))
