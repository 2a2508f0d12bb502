"""Watches a run: after every batch, whether it is well, and what is done if not.

What is watched costs next to nothing: the loss, the gradient's norm, the temperature, the loss
scale, how alike embeddings are, the update RMS of one matrix. Tensor by tensor, it is looked closer
when something is wrong.

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
from torch import Tensor, nn

from pennyclip.config import Config
from pennyclip.data.loader import Batch
from pennyclip.errors import RequestError, RunError
from pennyclip.health import Health
from pennyclip.loss import LOSSES
from pennyclip.loss_course import SHORT, LossCourse
from pennyclip.optim.update_rms import LIMIT, judged, largest_tensors, update_rms

FLAT = 0.1
"""Nats by which logits differ in a batch, at most, when its embeddings have collapsed. Chosen: a
ninth of the least that a healthy start from random weights was seen with."""
DRIFT = 4.0
"""How many times smaller than at the start of training the logits' scale has become when the
temperature is said to drift. Chosen: runs that came to good dipped to 1.6 times smaller."""
UNREADABLE, UNREADABLE_WINDOW = 0.05, 20
"""Share of unreadable rows in the last so many batches that stops a run. Chosen: `prepare` has
decoded every row, so one is an accident and many are a failing disk."""
OVERFLOWS, OVERFLOW_WINDOW = 5, 100
"""Overflows among so many batches that lower the rate, at a loss scale that had held before
(requirement P6). Chosen: the scale's own growth causes one in 2,000."""
LOWEST = 0.01
"""Share of its schedule below which the rate is not lowered. Chosen: a run that needs so little has
another fault."""
DETAILS_EVERY = 50
"""Batches between two looks at every gradient, which are passes over all of them."""
QUIET = 500
"""Batches before a warning is repeated. Chosen."""
ROWS = 8
"""How many an event names; all rows of a batch follow from the seed and the step."""

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

    def __init__(self, config: Config, log: Log, health: dict[str, Any] | None = None) -> None:
        """
        Args:
            config: of the run.
            log: for events.
            health: of a run that goes on, as `state` gave it.

        Raises:
            RequestError: settings that cannot work.
        """
        self._settings = settings = config.stability
        for wrong, rule in (
            (settings.rollbacks < 0, "rollbacks must be at least 0"),
            (not 0 < settings.rate_factor < 1, "rate_factor must lie between 0 and 1"),
            (settings.patience < 1, "patience must be at least 1 batch"),
        ):
            if wrong:
                raise RequestError(f"stability.{rule}; found {settings}")
        self._config, self._log = config, log
        self._least_scale = LOSSES[config.loss].initial_scale / DRIFT
        self._update_rms: Tensor | None = None  # on the device, not waited for
        self.health = Health.load(health) if health else Health()

    def state(self) -> dict[str, Any]:
        """What the next `Watch` takes as `health`."""
        self._read_update_rms()
        return self.health.state()

    def enter_stage(self, number: int) -> None:
        """A stage begins or goes on. In a new one, what is normal has to be learnt anew."""
        if number != self.health.stage:
            self.health.stage, self.health.course = number, LossCourse()

    @property
    def lr_factor(self) -> float:
        """Multiplies every rate."""
        return self.health.lr_factor

    @property
    def suspicious(self) -> bool:
        """Whether something is wrong for the moment, never for long: no time for a checkpoint."""
        return self.health.course.fresh

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
            record: what `update` returned.
            batch: what the update was made from.
            model: after it.
            optimizer: of the stage.

        Returns:
            None, or that the run must go back.

        Raises:
            RunError: nothing is left to be tried. The message names the first cause.
        """
        self._rows(step, batch)
        if record["skipped"]:
            return self._skipped(step, record)
        self.health.not_finite = []
        self.health.held = record.get("loss_scale", 0.0)
        self._temperature(step, record)
        self._outgrown(step, model, optimizer)
        if step == 1 or step % DETAILS_EVERY == 0:
            self._no_gradient(step, model)
        return self._collapse(step, record) or self._loss(step, record, batch, model, optimizer)

    # What is looked at.

    def _rows(self, step: int, batch: Batch) -> None:
        """Rows that could not be read, and in whose place others stand."""
        h, size = self.health, self._config.batch_size
        count = len(batch.unreadable)
        h.unreadable_counts = [*h.unreadable_counts, count][-UNREADABLE_WINDOW:]
        new = {row: why for row, why in batch.unreadable if row not in h.unreadable}
        if not new:
            return
        why = next(iter(new.values()))
        h.first_unreadable = h.first_unreadable or why
        h.unreadable += new
        message = f"{count} of {size} rows could not be read; others of the batch stand in. {why}"
        self._log(step, "rows unreadable", message, rows=list(new)[:ROWS])
        if sum(h.unreadable_counts) > UNREADABLE * UNREADABLE_WINDOW * size:
            raise RunError(
                f"{sum(h.unreadable_counts)} rows of the last {len(h.unreadable_counts)} batches "
                f"could not be read. The first: {h.first_unreadable} Check the disk, and prepare "
                "the dataset again."
            )

    def _skipped(self, step: int, record: dict[str, Any]) -> RollBack | None:
        """A loss or gradient that is not finite, from which no update was made."""
        h, found = self.health, record["skipped"]
        found = found | {"rows": found["rows"][:ROWS]}
        h.not_finite.append(step)
        if len(h.not_finite) == 1:
            h.first_cause = f"{found['tensor']} in batch {step}"
        message = f"{found['tensor']} is not finite; no update was made from this batch"
        patience, scale = self._settings.patience, record.get("loss_scale")
        if scale is not None:
            patience = self._config.loss_scaling.patience
            message += f"; loss scale {scale:,.0f} -> {found['loss_scale_after']:,.0f}"
        self._log(step, "update skipped", message, **found)
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
        if len(h.not_finite) < patience:
            return None
        cause = (
            f"no update could be made from {len(h.not_finite)} batches in a row, because of what "
            f"was not finite: {h.first_cause}"
        )
        if scale is not None:
            cause += (
                f"; the loss scale is down to {found['loss_scale_after']:,.0f}. bf16 or fp32 have "
                "more range than this precision"
            )
        return self._back(h.not_finite[0], cause, slow=h.rollbacks > 0)

    def _temperature(self, step: int, record: dict[str, Any]) -> None:
        """With unrelated pairs at cosine 0, no loss is below ln(1 + (N - 1) e^-scale)."""
        scale, candidates = math.exp(record["logit_scale"]), record.get("candidates", 0.0)
        if candidates > 1 and scale < self._least_scale:
            floor = math.log1p((candidates - 1) * math.exp(-scale))
            self._warn(
                step,
                "temperature",
                f"the temperature drifts toward 1, and is {1 / scale:.2f}: with {candidates:.0f} "
                f"candidates the loss can hardly fall below {floor:.2f}, and guessing costs "
                f"{math.log(candidates):.2f}",
                scale=scale,
            )

    def _outgrown(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The update RMS of the first matrix that learns: the patch embedding, if it does."""
        matrices = ((n, p) for n, p in model.named_parameters() if judged(n, p))
        name, first = next(matrices, ("", None))
        rms = None if first is None else update_rms(optimizer, first)
        if rms is None:
            return
        self._update_rms = rms if self._update_rms is None else self._update_rms.maximum(rms)
        if step % SHORT:
            return
        self._read_update_rms()
        rms_read, self.health.update_rms = self.health.update_rms, 0.0
        if rms_read > LIMIT:
            self._warn(
                step,
                "update RMS",
                f"an update of {name} in the last {SHORT} batches had an RMS of {rms_read:.1f}: "
                f"its gradients outgrow what the optimizer remembers of them. Above {LIMIT}, loss "
                "spikes follow",
                tensor=name,
                update_rms=rms_read,
            )

    def _read_update_rms(self) -> None:
        if self._update_rms is not None:
            self.health.update_rms = max(self.health.update_rms, float(self._update_rms))
            self._update_rms = None

    def _no_gradient(self, step: int, model: nn.Module) -> None:
        """A tower whose gradient is exactly zero learns nothing, whatever it is shown."""
        for part, tower in (("visual.", "image"), ("text.", "text")):
            parameters = [p for name, p in model.named_parameters() if name.startswith(part)]
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients and not float(torch.nn.utils.get_total_norm(gradients)):
                message = f"the gradient of the {tower} tower is zero throughout"
                self._warn(step, "no gradient", message, tower=tower)

    def _collapse(self, step: int, record: dict[str, Any]) -> RollBack | None:
        """Whether all embeddings of a tower have become one.

        Beside what depends on the row or the column alone, logits have at most this standard
        deviation (Cauchy-Schwarz; 1 - mean cosine is the variance of unit vectors).
        """
        h, alike = self.health, (record["image_cosine"], record["text_cosine"])
        apart = [max(0.0, 1 - cosine) for cosine in alike]
        spread = math.exp(record["logit_scale"]) * math.sqrt(apart[0] * apart[1])
        h.spreads = [*h.spreads, spread][-SHORT:]
        if len(h.spreads) < SHORT or median(h.spreads) >= FLAT:
            return None
        return self._back(
            step - SHORT + 1,
            f"the embeddings have collapsed: the mean cosine of different images is {alike[0]:.3f},"
            f" of different texts {alike[1]:.3f}, so nothing can be told apart. The rate is too "
            "high for this model, or its warm-up too short",
            slow=True,
        )

    def _loss(
        self,
        step: int,
        record: dict[str, Any],
        batch: Batch,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> RollBack | None:
        """Whether the loss has left its course, for a moment or for good."""
        course = self.health.course
        candidates = max(1.0, record.get("candidates", 1.0))
        if course.see(step, record["loss"], math.log(candidates)):
            self._log(
                step,
                "loss spike",
                f"the loss is {record['loss']:.3f}, and was {course.normal:.3f} on average before "
                f"batch {course.since}",
                since=course.since,
                rows=batch.rows[:ROWS].tolist(),
                seed=self._config.seed,
                micro_batch=record["micro_batch"],
                grad_norm=record["grad_norm"],
                **largest_tensors(model, optimizer),
            )
        if not course.lasting:
            return None
        assert course.since is not None
        return self._back(
            course.since,
            f"the loss rose in batch {course.since} and stays up: {median(course.last):.3f} in the "
            f"last {SHORT} batches, {course.normal:.3f} on average before",
            slow=self.health.rollbacks > 0,
        )

    # What is done.

    def _back(self, since: int, cause: str, *, slow: bool) -> RollBack:
        if self.health.rollbacks >= self._settings.rollbacks:
            raise RunError(
                f"{cause}. The run was rolled back {self.health.rollbacks} times before, as often "
                f"as stability.rollbacks allows. {self._first(cause, since)}"
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

    def rolled_back(self, step: int, back: RollBack, to: int, undone: int) -> None:
        """The run has gone back to the checkpoint of step `to` (0: its start).

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
        h.rollbacks += 1
        h.course.forget_spike()
        h.not_finite, h.spreads, h.overflows = [], [], []
        h.update_rms, self._update_rms = 0.0, None
        where = f"the checkpoint of step {to}" if to else "the run's start"
        self._log(
            step,
            "rolled back",
            f"{back.cause}. Back to {where}, and on with batch {step + 1}",
            to=to,
            since=back.since,
            undone=undone,
            rollback=h.rollbacks,
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

    def _warn(self, step: int, name: str, message: str, **evidence: Any) -> None:
        key = f"{name} {evidence.get('tower', '')}"
        if step - self.health.told.get(key, -QUIET) >= QUIET:
            self.health.told[key] = step
            self._log(step, name, message, **evidence)
