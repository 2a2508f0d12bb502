"""A run as a list of stages, and what every update of it is: pure functions of the step."""

import math
from dataclasses import dataclass

from torch.optim import Optimizer

from pennyclip.base.errors import RequestError
from pennyclip.config.check import PARTS, check_config
from pennyclip.config.keys import Config, Optim, Stage
from pennyclip.optim.schedules import SCHEDULES, Schedule


@dataclass(frozen=True)
class Plan:
    """The course of a run, worked out from its configuration and the number of training rows."""

    rows: int
    stages: tuple[Stage, ...]
    ends: tuple[int, ...]
    """Updates made when each stage has ended."""
    warmup: int
    """Updates of linear warm-up."""
    schedule: Schedule
    min_lr_share: float
    cooldown_from: int
    """The update at which the cooldown of a run with one course begins, where it has one."""
    cooldown_share: float
    cools_down: bool
    evaluate_every: int
    """Updates between two evaluations."""
    lr_scale: float = 1.0
    """Multiplies every rate: the precision's."""

    @property
    def steps(self) -> int:
        """Updates in the whole run."""
        return self.ends[-1]

    def stage(self, step: int) -> int:
        """Number of the stage to which update `step` (from 0) belongs."""
        return next(i for i, end in enumerate(self.ends) if step < end)

    def course(self, step: int) -> tuple[int, int, int | None]:
        """First update and end of the course of the rates that update `step` belongs to, and the
        warm-up of a stage that begins one of its own (None: the run's)."""
        begin, end, warmup = 0, self.steps, None
        for number, stage in enumerate(self.stages):
            if number == 0 or stage.warmup_steps is None:
                continue
            if step < self.ends[number - 1]:
                end = self.ends[number - 1]
                break
            begin, warmup = self.ends[number - 1], stage.warmup_steps
        return begin, end, warmup

    def lr_factor(self, step: int, skipped: int = 0, warmup: int | None = None) -> float:
        """Share of the peak rate in update `step`: linear warm-up, then the schedule, by stage.

        Batches that were `skipped` before, no update being made from them, do not move the rate
        along its course, apart from a cooldown, which has to end with the data. `warmup`: a part's
        own, in updates; None: the run's.
        """
        begin, end, own = self.course(step)
        made = max(0, step - begin - skipped) if begin == 0 else step - begin
        warmup = own if own is not None else self.warmup if warmup is None else warmup
        if made < warmup:
            course = (made + 1) / warmup
        else:
            length = max(1, end - begin - warmup)
            if self.cools_down and step - begin >= self.cooldown(begin, end):
                made = step - begin
            left = self.schedule(
                (made - warmup) / length, (self.cooldown(begin, end) - warmup) / length
            )
            course = self.min_lr_share + (1 - self.min_lr_share) * left
        return course * self.stages[self.stage(step)].lr_factor * self.lr_scale

    def cooldown(self, begin: int, end: int) -> int:
        """At which of its updates the cooldown of a course begins, where its schedule has one."""
        if end == self.steps and begin == 0:
            return self.cooldown_from
        return end - begin - math.ceil(self.cooldown_share * (end - begin))

    def set_rates(
        self, optimizer: Optimizer, step: int, skipped: int = 0, factor: float = 1.0
    ) -> None:
        """Give every group of an optimizer its rate in update `step`, times `factor`."""
        for group in optimizer.param_groups:
            course = self.lr_factor(step, skipped, group["warmup"])
            group["lr"] = group["base_lr"] * course * factor

    def mask_ratio(self, step: int) -> float:
        """Share of the image patches that update `step` drops."""
        number = self.stage(step)
        first, last = self.stages[number].mask_range
        begin = self.ends[number - 1] if number else 0
        progress = (step - begin) / max(1, self.ends[number] - begin - 1)
        return first + (last - first) * progress

    def evaluation_is_due(self, step: int) -> bool:
        """Whether the model is evaluated when `step` updates have been made."""
        return step % self.evaluate_every == 0 or step == self.steps


def make_plan(config: Config, rows: int) -> Plan:
    """Work out the run, refusing one that would do nothing or not what it says.

    Raises:
        RequestError: no stages, a batch of 1, fewer rows than a batch, zero steps, a warm-up as
            long as the run.
    """
    check_config(config)
    batch = config.batch_size
    if rows < batch:
        raise RequestError(
            f"the subset '{config.subset}' has {rows} rows, fewer than batch_size = {batch}: every "
            f"batch would hold rows twice. Set --batch-size to at most {rows}, or add data."
        )
    if not config.stages:
        raise RequestError("the recipe has no stages: add at least one [[stages]] with its epochs")
    ends, total = [], 0
    for number, stage in enumerate(config.stages):
        if (stage.epochs is None) == (stage.samples is None):
            raise RequestError(f"stages[{number}]: give either epochs or samples")
        samples = stage.length(rows)
        steps = math.ceil(samples / batch)
        if steps < 1:
            raise RequestError(f"stages[{number}]: {samples} samples are no update. Lengthen it.")
        total += steps
        ends.append(total)
    optim = config.optim
    # Of the run as it was begun: a cooldown begun by hand changes nothing before it.
    warmup = (
        optim.warmup_steps if optim.warmup_steps is not None else int(optim.warmup_share * total)
    )
    cooldown_from, total = _cooldown(optim, total)
    ends = [min(end, total) for end in ends[:-1]] + [total]
    warmups = [warmup] + [w for p in PARTS if (w := getattr(optim, p).warmup_steps) is not None]
    if max(warmups) >= cooldown_from:
        raise RequestError(
            f"the warm-up ({max(warmups)} updates) is not shorter than the run ({total} updates, "
            f"the cooldown from {cooldown_from} on): the rate would never reach its peak. Lower "
            "optim.warmup_steps, or train longer."
        )
    return Plan(
        rows=rows,
        stages=config.stages,
        ends=tuple(ends),
        warmup=warmup,
        schedule=SCHEDULES[optim.schedule],
        min_lr_share=optim.min_lr_share,
        cooldown_from=cooldown_from,
        cooldown_share=optim.cooldown_share,
        cools_down=optim.schedule == "wsd",
        evaluate_every=max(1, math.ceil(config.evaluate.every_epochs * rows / batch)),
    )


def _cooldown(optim: Optim, total: int) -> tuple[int, int]:
    """The update at which the rate begins to fall for the last time, and the length of the run.

    A cooldown that was asked for early moves the run's end: its length stays the same share of the
    whole.
    """
    if optim.schedule != "wsd":
        if optim.cooldown_from is not None:
            raise RequestError(
                f"optim.cooldown_from = {optim.cooldown_from}, and the schedule is "
                f"'{optim.schedule}': only 'wsd' has a cooldown. Leave it out, or set "
                "optim.schedule to wsd."
            )
        return total, total
    if not 0 < optim.cooldown_share < 1:
        raise RequestError(
            f"optim.cooldown_share = {optim.cooldown_share:g}: expected a share of the run, above "
            "0 and below 1"
        )
    planned, share = total - math.ceil(optim.cooldown_share * total), optim.cooldown_share
    if optim.cooldown_from is None:
        return planned, total
    if optim.cooldown_from > planned:
        raise RequestError(
            f"optim.cooldown_from = {optim.cooldown_from}: the run's own cooldown begins at update "
            f"{planned} already. Leave it out; or start a longer run with --init."
        )
    return optim.cooldown_from, optim.cooldown_from + max(
        1, round(optim.cooldown_from * share / (1 - share))
    )
