"""When a run is saved, and what happens if that fails."""

import math
import time

import torch

from pennyclip.checkpoint import checkpoints, save
from pennyclip.config import Config
from pennyclip.errors import RunError
from pennyclip.model.clip import CLIP
from pennyclip.optim.state import read_state
from pennyclip.run_folder import RunFolder
from pennyclip.scaling import LossScaler
from pennyclip.session import Rows
from pennyclip.telemetry.console import Console
from pennyclip.telemetry.metrics import Metrics


class Saver:
    """Saves at a stage's end, when the score is the best so far, and every N steps or minutes."""

    def __init__(
        self, config: Config, run: RunFolder, rows: Rows, metrics: Metrics, console: Console
    ) -> None:
        self._config, self._run, self._rows = config.checkpoint, run, rows
        self._metrics, self._console = metrics, console
        scores = [c.score for c in checkpoints(run.path) if c.score is not None]
        self._top = max(scores, default=-math.inf)
        self._saved_at = time.monotonic()

    def is_due(self, step: int, score: float | None, ending: bool) -> bool:
        """Whether to save after update `step`, whose evaluation, if any, gave `score`."""
        every = self._config.every_steps
        return (
            ending
            or (score is not None and score > self._top)
            or (every is not None and step % every == 0)
            or time.monotonic() - self._saved_at > 60 * self._config.every_minutes
        )

    def save(
        self,
        step: int,
        score: float | None,
        model: CLIP,
        optimizer: torch.optim.Optimizer,
        skipped: int,
        scaler: LossScaler | None,
        last: bool,
    ) -> None:
        """Write a checkpoint. Where it cannot be written, earlier ones stay and the run goes on.

        Args:
            step: batches trained on.
            skipped: those of them from which no update was made.
            last: nothing comes after it.

        Raises:
            RunError: the last checkpoint of the run could not be written.
        """
        start = time.monotonic()
        self._saved_at = start
        trainer = {
            "optimizer": read_state(optimizer, model),
            "skipped": skipped,
            "scaler": scaler.state() if scaler else None,
        }
        try:
            path = save(
                self._run.path,
                step,
                score,
                model,
                trainer,
                self._rows.text_folder,
                self._rows.dataset.fingerprint,
                self._config.keep,
            )
        except OSError as error:
            message = (
                f"the checkpoint of step {step} could not be written: {error}. Earlier ones are "
                "untouched."
            )
            self._metrics.log("event", step, name="checkpoint failed", message=message)
            if last:
                raise RunError(
                    f"{message} Make room, then go on with: pennyclip train --resume "
                    f"{self._run.path}"
                ) from error
            self._console.say(f"{message} The run goes on; make room before the next save.")
            return
        if score is not None:
            self._top = max(self._top, score)
        seconds = time.monotonic() - start
        self._metrics.log(
            "checkpoint", step, path=str(path.relative_to(self._run.path)), seconds=seconds
        )
