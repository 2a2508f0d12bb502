"""When a run is saved, and what happens if that fails."""

import math
import time

from pennyclip.base.errors import RunError
from pennyclip.config.keys import Config
from pennyclip.training.folder import RunFolder
from pennyclip.training.stage import Rows
from pennyclip.training.state import TrainState
from pennyclip.training.telemetry.console import Console
from pennyclip.training.telemetry.metrics import Metrics, Record, read_metrics
from pennyclip.weights.checkpoint import Checkpoint, Scores, checkpoints, save

MARGIN = 10
"""Batches. What makes a loss rise has happened up to 8 before: Wortsman et al. 2023 (arXiv
2304.13013)."""
REACH = 1000
"""Batches. Beyond them only the best checkpoint is left, or one kept for a replay. Chosen: to lose
more costs more than to go back twice."""


def undone(records: list[Record]) -> list[tuple[int, int]]:
    """(to, at) of each rollback of a run: after batch `at`, what was learnt since `to` was lost."""
    events = [r for r in records if r["kind"] == "event" and not r.get("abandoned")]
    return [(r["to"], r["step"]) for r in events if r["name"] == "rolled back"]


def leading_to(
    batch: int, found: list[Checkpoint], undone: list[tuple[int, int]]
) -> list[Checkpoint]:
    """Those older than a batch, without those whose updates had been undone by then."""
    undone = [(to, at) for to, at in undone if at < batch]
    older = [c for c in found if c.step < batch]
    return [c for c in older if not any(to < c.step < at for to, at in undone)]


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

        Rather one that is `MARGIN` older, where there is one within `REACH`; never one that a
        rollback has left behind. None: the run's start is left.
        """
        records = read_metrics(self._run.metrics)
        found = leading_to(since, checkpoints(self._run.path), undone(records))
        good = [c for c in found if MARGIN <= since - c.step <= REACH] or found
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
                state.watch.health.worth_a_look,
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
