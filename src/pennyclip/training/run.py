"""A run made ready to make updates: once, for training, for measuring and for replaying.

`train`, `bench` and `doctor` all begin here, so what is measured or replayed is what is trained.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Config, Precision
from pennyclip.data.loader import Batch
from pennyclip.data.order import STEP, draw
from pennyclip.evaluation.features import Progress, silent
from pennyclip.loss import LOSSES, Loss
from pennyclip.model.clip import CLIP
from pennyclip.model.recompute import recompute
from pennyclip.optim.state import State
from pennyclip.training.plan import Plan, make_plan
from pennyclip.training.stage import Rows, Setup, check_stages, enter_stage, open_rows
from pennyclip.training.update.precision import Choice, assign, check_precision, choose, lr_scale
from pennyclip.training.update.scaling import LossScaler
from pennyclip.training.update.update import update
from pennyclip.weights.checkpoint import Checkpoint
from pennyclip.weights.start import Start, start


@dataclass(frozen=True)
class Ready:
    """A run whose request was found sound, with its model on its device."""

    config: Config
    rows: Rows
    plan: Plan
    start: Start
    loss: Loss
    device: torch.device
    choice: Choice
    """Of the precision, and why."""

    @property
    def model(self) -> CLIP:
        return self.start.model

    @property
    def precision(self) -> Precision:
        """Never `auto`."""
        return self.choice.precision

    def enter_stage(self, number: int, state: State, progress: Progress = silent) -> Setup:
        """Freeze, regroup and load as stage `number` does: see `session.enter_stage`."""
        return enter_stage(self.model, self.config, number, self.rows, state, progress)

    def update(
        self,
        setup: Setup,
        batch: Batch,
        step: int,
        scaler: LossScaler | None,
        micro_batch: int | None = None,
        *,
        mask_ratio: float | None = None,
    ) -> dict[str, Any]:
        """One update with the rates that the optimizer's groups have now: see `update.update`.

        Args:
            setup: of the stage.
            batch: of any device.
            step: from 0. With the run's seed it decides all that is drawn in the update.
            scaler: of the loss; None: it is not scaled.
            micro_batch: pairs in the towers at a time; None: the batch.
            mask_ratio: share of the patches that is dropped; None: what is planned for `step`.
        """
        ratio = self.plan.mask_ratio(step) if mask_ratio is None else mask_ratio
        return update(
            self.model,
            self.loss,
            setup.optimizer,
            batch.to(self.device),
            keep=setup.keep(ratio, step, self.device),
            clip_norm=self.config.optim.clip_norm,
            precision=self.precision,
            stochastic_rounding=self.config.optim.stochastic_rounding,
            scaler=scaler,
            micro_batch=micro_batch,
            seed=step_seed(self.config.seed, step),
            layers=setup.layers,
        )


def open_request(config: Config) -> tuple[Config, Rows, Plan]:
    """What is asked for, before any model is built.

    Returns:
        The request with nothing left open (absolute paths, and whether logits have a bias), its
        rows, and the course of the run.

    Raises:
        RequestError: it cannot be trained, whatever the model.
    """
    config = resolved(config)
    rows = open_rows(config)
    return config, rows, make_plan(config, rows.epoch)


def resolved(config: Config) -> Config:
    """The request with absolute paths, and with or without a bias of the logits as its loss says.

    Raises:
        RequestError: there is no such loss, or the model is asked for otherwise.
    """
    if config.loss not in LOSSES:
        raise RequestError(f"loss '{config.loss}': known are {', '.join(LOSSES)}")
    has_bias, asked = LOSSES[config.loss].initial_bias is not None, config.model.logit_bias
    if asked not in (None, has_bias):
        raise RequestError(
            f"model.logit_bias = {str(asked).lower()}, and the loss '{config.loss}' needs "
            f"{'a' if has_bias else 'no'} bias. Leave model.logit_bias out, or set it to None on "
            "the command line: the loss decides it."
        )
    return replace(
        config,
        data=_absolute(config.data),
        init=_absolute(config.init),
        model=replace(config.model, logit_bias=has_bias),
        augment=replace(config.augment, wordnet=_absolute(config.augment.wordnet)),
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def make_ready(config: Config, rows: Rows, plan: Plan, last: Checkpoint | None = None) -> Ready:
    """Build the model, find out what would fail later, and bring it into its precision.

    Args:
        config, rows, plan: as `open_request` gave them.
        last: the run's own checkpoint to go on from; None: it begins.

    Raises:
        RequestError: the request cannot be trained as it stands.
    """
    beginning = start(config, last)
    model = beginning.model
    check_stages(model, config)
    check_precision(model, config)
    device = run_device()
    model.to(device)
    choice = choose(config.precision, device, sum(p.numel() for p in model.parameters()))
    assign(model, choice.precision, config.precision_of)
    # After that: it wraps what the modules' classes, which may just have changed, compute.
    recompute(model, config.activation_checkpointing)
    plan = replace(plan, lr_scale=lr_scale(config, choice.precision))
    return Ready(config, rows, plan, beginning, LOSSES[config.loss], device, choice)


def run_device() -> torch.device:
    """Where a run computes: the GPU, if torch sees one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step_seed(seed: int, step: int) -> int:
    """Seeds everything random inside an update, so that any update can be had again."""
    return int(draw(seed, STEP, np.array([0]), np.array([step]))[0] >> np.uint64(1))
