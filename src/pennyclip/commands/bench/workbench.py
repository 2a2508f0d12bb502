"""A stage of a recipe, ready to make updates as a run would, without a run's folder."""

from dataclasses import dataclass

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Config, Stage
from pennyclip.evaluation.features import Progress, silent
from pennyclip.training.run import Ready, make_ready, open_request
from pennyclip.training.stage import Setup
from pennyclip.training.update.scaling import LossScaler, make_scaler


@dataclass(frozen=True)
class Workbench(Ready):
    """A model at a run's start, with what one stage of the run works with."""

    number: int
    """Of the stage, from 0."""
    setup: Setup
    scaler: LossScaler | None

    @property
    def stage(self) -> Stage:
        return self.config.stages[self.number]

    @property
    def title(self) -> str:
        return f"stage {self.number + 1} of {len(self.config.stages)}"


def stage_number(config: Config, stage: int | None, default: int) -> int:
    """The index of the stage that was asked for, counted from 1; of the default where none was.

    Raises:
        RequestError: there is no such stage.
    """
    count = len(config.stages)
    if stage is not None and not 1 <= stage <= count:
        raise RequestError(f"stage {stage}: the recipe has stages 1 to {count}")
    return range(count)[default if stage is None else stage - 1]


def open_workbench(config: Config, number: int, progress: Progress = silent) -> Workbench:
    """Build the model from what the recipe starts from, and enter a stage.

    Raises:
        RequestError: the request could not be trained as it stands.
    """
    ready = make_ready(*open_request(config))
    scaler = make_scaler(ready.config, ready.precision)
    setup = ready.enter_stage(number, {}, progress)
    return Workbench(**vars(ready), number=number, setup=setup, scaler=scaler)
