"""When a run is saved, and what happens if that fails."""

import math
import time

from pennyclip.checkpoint import Checkpoint, Scores, checkpoints, save
from pennyclip.config import Config
from pennyclip.errors import RunError
from pennyclip.run_folder import RunFolder
from pennyclip.session import Rows
from pennyclip.state import TrainState
from pennyclip.telemetry.console import Console
from pennyclip.telemetry.metrics import Metrics

MARGIN = 10
"""Batches. What makes a loss rise has happened up to 8 before: Wortsman et al. 2023 (arXiv
2304.13013)."""


class Saver:
    """Saves at a stage's end, when the score is the best so far, and every N steps or minutes."""

    def __init__(
        self, config: Config, run: RunFolder, rows: Rows, metrics: Metrics, console: Console
    ) -> None:
        self._config, self._run, self._rows = config.checkpoint, run, rows
        self._metrics, self._console = metrics, console
        found = checkpoints(run.path)
        self._top = [
            max((s for s in scores if s is not None), default=-math.inf)
            for scores in ([c.score for c in found], [c.ema_score for c in found])
        ]
        self._saved_at = time.monotonic()

    def before(self, since: int) -> Checkpoint | None:
        """The last checkpoint that is older than batch `since`, which was not well.

        Rather one that is `MARGIN` older, where there is one; None: the run's start is left.
        """
        found = [c for c in checkpoints(self._run.path) if c.step < since]
        good = [c for c in found if c.step <= since - MARGIN] or found
        return good[-1] if good else None

    def is_due(self, state: TrainState, scores: Scores, ending: bool) -> bool:
        """Whether to save now, after an evaluation, if any, that gave `scores`.

        While something is wrong it is not: what is saved shall be worth going back to.
        """
        step, every = state.step, self._config.every_steps
        return ending or (
            not state.watch.suspicious
            and (
                any(s is not None and s > top for s, top in zip(scores, self._top, strict=True))
                or (every is not None and step % every == 0)
                or time.monotonic() - self._saved_at > 60 * self._config.every_minutes
            )
        )

    def save(self, state: TrainState, scores: Scores, last: bool) -> None:
        """Write a checkpoint. Where it cannot be written, earlier ones stay and the run goes on.

        Args:
            state: where the run stands, its optimizer's state up to date.
            scores: of the weights and of their average.
            last: nothing comes after it.

        Raises:
            RunError: the last checkpoint of the run could not be written.
        """
        begun, step = time.monotonic(), state.step
        self._saved_at = begun
        try:
            path = save(
                self._run.path,
                step,
                scores,
                state.model,
                state.ema,
                state.trainer(),
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
        for which, score in enumerate(scores):
            if score is not None:
                self._top[which] = max(self._top[which], score)
        seconds = time.monotonic() - begun
        self._metrics.log(
            "checkpoint", step, path=str(path.relative_to(self._run.path)), seconds=seconds
        )
