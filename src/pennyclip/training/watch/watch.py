"""Watches a run: after every batch, whether it is well, and what is done if not.

What is watched costs next to nothing: the loss, the gradient's norm by layer, the temperature, the
loss scale, how alike embeddings are, the update RMS of one matrix. Row by row and tensor by tensor,
it is looked closer when something is wrong.

    fine         nothing is said
    warn         an event
    skip         a loss or gradient that is not finite: `update.py` made no update
    slow down    every rate is multiplied by `stability.rate_factor` from here on
    roll back    weights and optimizer of an earlier checkpoint; the data go on where they stand
    stop         a `RunError` that names the first cause

Rolling back past a spike's batches: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), section 5.1.
Going on at a lower rate: Zhang et al. 2022 (OPT, arXiv 2205.01068), section 2.5.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from pennyclip.base.errors import RunError
from pennyclip.config.keys import Config
from pennyclip.data.loader import Batch
from pennyclip.loss import LOSSES, Features
from pennyclip.training.watch.collapse import Collapse, described, longest
from pennyclip.training.watch.course import SHORT
from pennyclip.training.watch.evidence import ROWS, Evidence, worst_rows
from pennyclip.training.watch.health import Health
from pennyclip.training.watch.symptoms import Symptom, drifting_temperature, no_gradient
from pennyclip.training.watch.update_rms import LIMIT, LargestRms, largest_tensors

OVERFLOWS, OVERFLOW_WINDOW = 5, 100
"""Overflows among so many batches that lower the rate, at a loss scale that had held before
(requirement P6). Chosen: the scale's own growth causes one in 2,000."""
SKIPS, SKIP_WINDOW = 20, 50
"""Batches without an update among so many that are too many, though not in a row. Chosen: more than
the 16 that bring fp16's loss scale down at first; and what costs 2 of 5 batches is no accident."""
REFILL = 2000
"""Updates since the last rollback after which `stability.rollbacks` are all there again. Chosen:
PaLM's spikes, about 20 in 255,000 steps (see above), were further apart; going back has not mended
what is back within so many."""
LOWEST = 0.01
"""Share of its schedule below which the rate is not lowered. Chosen: a run that needs so little has
another fault."""
SHORTEST, FEWEST = 60, 32
"""Batches of a run, and candidates in a batch, from which on it goes back because of its first
losses. Chosen: a shorter run has no time to begin anew; and in batches of 8 a random start's losses
alone differ by as much."""
HIGH = "the rate is too high for this model and batch, or its warm-up too short"
QUIET = 500
"""Batches before a warning is repeated. Chosen."""

Log = Callable[..., None]
"""`log(step, name, message, **evidence)` writes an event down, and says it."""


@dataclass(frozen=True)
class RollBack:
    """An earlier checkpoint is to be gone back to."""

    since: int
    """The first batch that was not well: the checkpoint must be older."""
    cause: str
    slow: bool
    """Whether the rate is to be lowered too."""


class Watch:
    """Judges every batch of a run."""

    def __init__(
        self, config: Config, steps: int, log: Log, health: dict[str, Any] | None = None
    ) -> None:
        """
        Args:
            config: of the run.
            steps: batches of the run.
            log: for events.
            health: of a run that goes on, as `state` gave it.
        """
        self._settings = config.stability
        self._config, self._log = config, log
        self._flat_for, self._short = longest(steps), steps < SHORTEST
        self._initial_scale = LOSSES[config.loss].initial_scale
        self._largest_rms = LargestRms()
        self.health = Health.load(health) if health else Health()

    def state(self) -> dict[str, Any]:
        """What the next `Watch` takes as `health`."""
        self._read_update_rms()
        return self.health.state()

    def enter_stage(self, number: int) -> None:
        """A stage begins or goes on."""
        if number != self.health.stage:
            self.health.stage, self.health.evidence = number, Evidence()
            self.health.course.enter_stage()

    @property
    def lr_factor(self) -> float:
        """Multiplies every rate."""
        return self.health.lr_factor

    @property
    def alike(self) -> bool:
        """Whether the embeddings of the last batches were all alike."""
        return self.health.collapse.since is not None

    @property
    def suspicious(self) -> bool:
        """Whether something is wrong for the moment, never for long: no time for a checkpoint."""
        return self.health.course.fresh or self.alike

    def judge(
        self,
        step: int,
        record: dict[str, Any],
        batch: Batch,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> RollBack | None:
        """Look at a batch after its update, while its gradients are still there.

        Args:
            step: batches seen, this one included.
            record: what `update` returned; the embeddings are taken out of it.
            batch: what the update was made from.
            model: after it.
            optimizer: of the stage.

        Returns:
            None, or that the run must go back.

        Raises:
            RunError: nothing is left to be tried. The message names the first cause.
        """
        h, features = self.health, record.pop("features")
        self._rows(step, batch)
        h.evidence.see_norms(record["grad_norms"])
        if record["skipped"]:
            return self._skipped(step, record, batch, features)
        h.not_finite = []
        h.held = record.get("loss_scale", 0.0)
        h.updates += 1
        if h.updates >= REFILL:
            h.rollbacks, h.first_trouble = 0, None
        if symptom := drifting_temperature(record, self._initial_scale):
            self._warn(step, symptom)
        for symptom in no_gradient(record["grad_norms"], h.evidence.silent()):
            self._warn(step, symptom)
        self._outgrown(step, model, optimizer)
        return self._collapse(step, record) or self._loss(
            step, record, batch, features, model, optimizer
        )

    # What is looked at.

    def _rows(self, step: int, batch: Batch) -> None:
        """Rows that could not be read, and in whose place others stand."""
        seen, size = self.health.unreadable, self._config.batch_size
        new = seen.see(batch)
        if not new:
            return
        message = (
            f"{seen.counts[-1]} of {size} rows could not be read; others of the batch stand in. "
            f"{next(iter(new.values()))}"
        )
        self._log(step, "rows unreadable", message, rows=list(new)[:ROWS])
        if seen.too_many(size):
            raise RunError(
                f"{sum(seen.counts)} rows of the last {len(seen.counts)} batches could not be "
                f"read. The first: {seen.first} Check the disk, and prepare the dataset again."
            )

    def _skipped(
        self, step: int, record: dict[str, Any], batch: Batch, features: Features
    ) -> RollBack | None:
        """A loss or gradient that is not finite, from which no update was made."""
        h, found = self.health, record["skipped"]
        rows = found["rows"]
        if len(rows) == len(batch.rows):  # none is to blame alone, so those that lose most
            rows = [row for _, row in worst_rows(batch, features)]
        found = found | {"rows": rows[:ROWS]} | h.evidence.jumps(step)
        h.not_finite.append(step)
        message = f"{found['tensor']} is not finite; no update was made from this batch"
        patience, scale = self._settings.patience, record.get("loss_scale")
        if scale is not None:
            patience = self._config.loss_scaling.patience
            message += f"; loss scale {scale:,.0f} -> {found['loss_scale_after']:,.0f}"
        self._log(step, "update skipped", message, **found)
        if scale is None or 0 < scale <= h.held:
            h.trouble(h.not_finite[0])
        if scale is not None and 0 < scale <= h.held:  # the scale's growth is not to blame
            h.held = 0.0
            h.overflows = [s for s in h.overflows if s > step - OVERFLOW_WINDOW] + [step]
            if len(h.overflows) >= OVERFLOWS:
                h.overflows = []
                self._slow_down(
                    step,
                    f"{OVERFLOWS} of the last {OVERFLOW_WINDOW} batches overflowed at a loss scale "
                    "that had held before",
                )
        window = max(SKIP_WINDOW, patience)
        h.skips = {s: tensor for s, tensor in h.skips.items() if s > step - window}
        h.skips[step] = found["tensor"]
        if len(h.not_finite) >= patience:
            since, which = h.not_finite[0], f"{len(h.not_finite)} batches in a row"
        elif len(h.skips) >= max(SKIPS, patience):
            since, which = min(h.skips), f"{len(h.skips)} of the last {window} batches"
        else:
            return None
        cause = (
            f"no update could be made from {which}, because of what was not finite: "
            f"{h.skips[since]} in batch {since}"
        )
        if scale is not None:
            cause += (
                f"; the loss scale is down to {found['loss_scale_after']:,.0f}. bf16 or fp32 have "
                "more range than this precision"
            )
        return self._back(since, cause, slow=h.rollbacks > 0 or self.alike)

    def _outgrown(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The update RMS of the first matrix that learns: the patch embedding, if it does."""
        name = self._largest_rms.see(model, optimizer)
        if name is None:
            return
        if step % SHORT:
            return
        self._read_update_rms()
        rms_read, self.health.update_rms = self.health.update_rms, 0.0
        if rms_read > LIMIT:
            message = (
                f"an update of {name} in the last {SHORT} batches had an RMS of {rms_read:.1f}: "
                f"its gradients outgrow what the optimizer remembers of them. Above {LIMIT}, loss "
                "spikes follow"
            )
            evidence = {"tensor": name, "update_rms": rms_read}
            self._warn(step, Symptom("update RMS", message, evidence))

    def _read_update_rms(self) -> None:
        self.health.update_rms = max(self.health.update_rms, self._largest_rms.read())

    def _collapse(self, step: int, record: dict[str, Any]) -> RollBack | None:
        """Whether all embeddings of a tower have become one."""
        self.health.collapse.see(step, record)
        since = self.health.collapse.since
        if since is None:
            return None
        seen = described(record)
        if step - since + 1 >= self._flat_for:
            return self._back(since, f"the embeddings have collapsed: {seen}: {HIGH}", slow=True)
        later = f"if not by batch {since + self._flat_for - 1}, the run goes back"
        message = f"{seen}: {HIGH}. They may part again; {later}"
        self._warn(step, Symptom("embeddings alike", message))
        return None

    def _loss(
        self,
        step: int,
        record: dict[str, Any],
        batch: Batch,
        features: Features,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> RollBack | None:
        """Whether the loss has left its course, for a moment or for good."""
        course, evidence = self.health.course, self.health.evidence
        candidates = max(1.0, record.get("candidates", 1.0))
        spike = course.see(step, record["loss"], math.log(candidates))
        if course.since is None:
            evidence.rows = []
        elif course.deviating[-1]:
            evidence.see_rows(step, batch, features)
        if spike:
            self.health.trouble(course.since or step)
            self._log(
                step,
                "loss spike",
                f"the loss is {record['loss']:.3f}, and was {course.normal:.3f} on average before "
                f"batch {course.since}",
                since=course.since,
                **evidence.suspects(step),
                seed=self._config.seed,
                micro_batch=record["micro_batch"],
                grad_norm=record["grad_norm"],
                **largest_tensors(model, optimizer),
            )
        may = not self._short and self.health.rollbacks < self._settings.rollbacks
        if course.rough and candidates >= FEWEST and may:
            return self._back(
                step,
                f"the loss of batch {step} is {record['loss']:.2f}, and guessing costs "
                f"{math.log(candidates):.2f}: {HIGH}",
                slow=True,
            )
        if not course.lasting:
            return None
        assert course.since is not None
        return self._back(
            course.since,
            f"the loss rose in batch {course.since} and stays up: {median(course.last):.3f} in the "
            f"last {SHORT} batches, {course.normal:.3f} on average before",
            slow=self.health.rollbacks > 0 or self.alike,
        )

    # What is done.

    def _back(self, since: int, cause: str, *, slow: bool) -> RollBack:
        if self.health.rollbacks >= self._settings.rollbacks:
            raise RunError(
                f"{cause}. The run was rolled back {self.health.rollbacks} times before, as often "
                f"as stability.rollbacks allows within {REFILL:,} updates. "
                f"{self._first(cause, since)}"
            )
        return RollBack(since, cause, slow)

    def _first(self, cause: str, since: int) -> str:
        """The first cause, and where to look."""
        first, batch = self.health.first_trouble or (cause, since)
        return (
            ("" if first == cause else f"The first cause: {first}. ")
            + "Checkpoints are untouched. Look at the batch with: pennyclip doctor RUN --replay "
            f"{batch}; lower the learning rate, lengthen the warm-up, or take these rows out."
        )

    def rolled_back(
        self, step: int, back: RollBack, to: int, undone: int, then: dict[str, Any] | None
    ) -> None:
        """The run has gone back to the checkpoint of step `to` (0: its start).

        Args:
            step: at which it goes back.
            back: why.
            undone: updates that are lost.
            then: what `state` gave at the checkpoint: from there on it is what is normal.

        Raises:
            RunError: no update was made since then, so that the same would happen again.
        """
        if not undone:
            raise RunError(
                f"{back.cause}. No update was made since the last checkpoint, so going back would "
                f"change nothing. {self._first(back.cause, back.since)}"
            )
        h = self.health
        h.first_trouble = h.first_trouble or (back.cause, back.since)
        h.trouble(back.since)
        h.rollbacks += 1
        h.updates = 0
        suspects = h.evidence.suspects(step)
        h.evidence.forget()
        before = Health.load(then) if then else Health()
        h.course = before.course
        h.course.forget_spike()
        if before.stage != h.stage:
            h.course.enter_stage()
        h.not_finite, h.skips, h.overflows = [], {}, []
        h.collapse = Collapse()
        h.update_rms, self._largest_rms = 0.0, LargestRms()
        where = f"the checkpoint of step {to}" if to else "the run's start"
        self._log(
            step,
            "rolled back",
            f"{back.cause}. Back to {where}, and on with batch {step + 1}",
            to=to,
            since=back.since,
            undone=undone,
            rollback=h.rollbacks,
            **suspects,
        )
        if back.slow:
            self._slow_down(step, "it may be what broke the run")

    def _slow_down(self, step: int, why: str) -> None:
        h = self.health
        h.lr_factor *= self._settings.rate_factor
        if h.lr_factor < LOWEST:
            raise RunError(
                f"every learning rate was lowered to {h.lr_factor / self._settings.rate_factor:.2g}"
                f" of its schedule, and would have to be again: {why}. {self._first(why, step)}"
            )
        message = f"every learning rate is {h.lr_factor:.2g} of its schedule from here on: {why}"
        self._log(step, "rate reduced", message, lr_factor=h.lr_factor)

    def _warn(self, step: int, symptom: Symptom) -> None:
        key = f"{symptom.name} {symptom.evidence.get('tower', '')}"
        if step - self.health.told.get(key, -QUIET) >= QUIET:
            self.health.told[key] = step
            self._log(step, symptom.name, symptom.message, **symptom.evidence)
