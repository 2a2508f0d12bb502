"""A recipe made ready to make updates, as a run would, without a run's folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from pennyclip.config import Config, Precision
from pennyclip.data.loader import Batch
from pennyclip.errors import RequestError
from pennyclip.features import Progress, silent
from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.model.recompute import recompute
from pennyclip.precision import assign, choose, lr_scale
from pennyclip.precision import check as check_precision
from pennyclip.run_folder import RunFolder
from pennyclip.scaling import LossScaler, make_scaler
from pennyclip.session import Rows, Setup, check_stages, enter_stage, open_rows
from pennyclip.stages import Plan, make_plan
from pennyclip.start import start
from pennyclip.train import step_seed
from pennyclip.update import update


@dataclass(frozen=True)
class Workbench:
    """A model at a run's start, with what one stage of the run works with."""

    config: Config
    number: int
    """Of the stage, from 0."""
    model: CLIP
    rows: Rows
    plan: Plan
    setup: Setup
    precision: Precision
    scaler: LossScaler | None
    device: torch.device

    def update(
        self,
        batch: Batch,
        step: int,
        *,
        keep: Int64[Tensor, "B K"] | None = None,
        micro_batch: int | None = None,
    ) -> dict[str, Any]:
        """One update with the rates that the optimizer's groups have now: see `update.update`."""
        return update(
            self.model,
            LOSSES[self.config.loss],
            self.setup.optimizer,
            batch.to(self.device),
            keep=keep,
            clip_norm=self.config.optim.clip_norm,
            precision=self.precision,
            stochastic_rounding=self.config.optim.stochastic_rounding,
            scaler=self.scaler,
            micro_batch=micro_batch,
            seed=step_seed(self.config.seed, step),
        )


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
    if config.loss not in LOSSES:
        raise RequestError(f"loss '{config.loss}': known are {', '.join(LOSSES)}")
    has_bias = LOSSES[config.loss].initial_bias is not None
    config = replace(config, model=replace(config.model, logit_bias=has_bias))
    rows = open_rows(config)
    plan = make_plan(config, rows.epoch)
    model = start(config, RunFolder(Path(), None)).model
    check_stages(model, config)
    check_precision(model, config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device)
    choice = choose(config.precision, device, sum(p.numel() for p in model.parameters()))
    assign(model, choice.precision, config.precision_of)
    recompute(model, config.activation_checkpointing)  # after that, as in a run
    plan = replace(plan, lr_scale=lr_scale(config, choice.precision))
    setup = enter_stage(model, config, number, rows, {}, progress)
    scaler = make_scaler(config, choice.precision)
    return Workbench(config, number, model, rows, plan, setup, choice.precision, scaler, device)
