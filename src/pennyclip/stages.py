"""A run as a list of stages, and what every update of it is: pure functions of the step."""

import math
from dataclasses import dataclass

from pennyclip.config import Augment, Config, Stage
from pennyclip.errors import RequestError


@dataclass(frozen=True)
class Plan:
    """The course of a run, worked out from its configuration and the number of training rows."""

    rows: int
    stages: tuple[Stage, ...]
    ends: tuple[int, ...]
    """Updates made when each stage has ended."""
    warmup: int
    """Updates of linear warm-up."""
    min_lr_share: float
    evaluate_every: int
    """Updates between two evaluations."""

    @property
    def steps(self) -> int:
        """Updates in the whole run."""
        return self.ends[-1]

    def stage(self, step: int) -> int:
        """Number of the stage to which update `step` (from 0) belongs."""
        return next(i for i, end in enumerate(self.ends) if step < end)

    def lr_factor(self, step: int, skipped: int = 0) -> float:
        """Share of the peak rate in update `step`: linear warm-up, then a cosine, by stage.

        Loshchilov and Hutter 2017, equation 5, without restarts. Batches that were `skipped`
        before, no update being made from them, do not move the rate along its course.
        """
        made = step - skipped
        if made < self.warmup:
            course = (made + 1) / self.warmup
        else:
            progress = (made - self.warmup) / max(1, self.steps - self.warmup)
            floor = self.min_lr_share
            course = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        return course * self.stages[self.stage(step)].lr_factor

    def evaluation_is_due(self, step: int) -> bool:
        """Whether the model is evaluated when `step` updates have been made."""
        return step % self.evaluate_every == 0 or step == self.steps


def make_plan(config: Config, rows: int) -> Plan:
    """Work out the run, refusing one that would do nothing or not what it says.

    Raises:
        RequestError: no stages, a batch of 1, fewer rows than a batch, zero steps, a warm-up as
            long as the run.
    """
    batch = config.batch_size
    if batch < 2:
        raise RequestError(
            f"batch_size = {batch}: a contrastive loss compares at least 2 pairs; with 1 it is 0 "
            "whatever the model does. Raise batch_size."
        )
    for name, value in (
        ("log_every", config.log_every),
        ("checkpoint.keep", config.checkpoint.keep),
        ("evaluate.chunk", config.evaluate.chunk),
    ):
        if value < 1:
            raise RequestError(f"{name} = {value}: expected at least 1")
    low, high = config.augment.crop_scale
    if not 0 < low <= high <= 1:
        raise RequestError(
            f"augment.crop_scale = {low:g} {high:g}: expected shares of the image's area, the "
            "smaller first, above 0 and at most 1"
        )
    if not 0 <= config.optim.warmup_share < 1:
        raise RequestError(
            f"optim.warmup_share = {config.optim.warmup_share:g}: expected a share of the run, at "
            "least 0 and below 1"
        )
    if not (config.optim.lr > 0 and math.isfinite(config.optim.lr)):
        raise RequestError(f"optim.lr = {config.optim.lr}: expected a finite number above 0")
    if rows < batch:
        raise RequestError(
            f"the subset '{config.subset}' has {rows} rows, fewer than batch_size = {batch}: every "
            f"batch would hold rows twice. Set --batch-size to at most {rows}, or add data."
        )
    if not config.stages:
        raise RequestError("the recipe has no stages: add at least one [[stages]] with its epochs")
    if config.augment != Augment() and all(s.image_layers == "none" for s in config.stages):
        raise RequestError(
            "augment would have no effect: the image trunk is frozen in every stage, so its "
            "features are computed once, from whole images. Leave augment out, or let image layers "
            "learn."
        )
    ends, total = [], 0
    for number, stage in enumerate(config.stages):
        if (stage.epochs is None) == (stage.samples is None):
            raise RequestError(f"stages[{number}]: give either epochs or samples")
        if stage.text_length is not None and stage.text_layers == "none":
            raise RequestError(
                f"stages[{number}]: text_length would have no effect: the text trunk is frozen, "
                "its features are computed once, from whole captions. Leave it out."
            )
        if stage.text_length is not None and stage.text_length < 3:
            raise RequestError(
                f"stages[{number}]: text_length = {stage.text_length} leaves no room for a word "
                "between the start and end tokens. Take at least 3, usually 16 or more."
            )
        samples = stage.samples if stage.samples is not None else (stage.epochs or 0) * rows
        steps = math.ceil(samples / batch)
        if steps < 1:
            raise RequestError(f"stages[{number}]: {samples} samples are no update. Lengthen it.")
        total += steps
        ends.append(total)
    optim = config.optim
    warmup = (
        optim.warmup_steps if optim.warmup_steps is not None else int(optim.warmup_share * total)
    )
    if warmup >= total:
        raise RequestError(
            f"the warm-up ({warmup} updates) is not shorter than the run ({total} updates): the "
            "rate would never reach its peak. Lower optim.warmup_steps, or train longer."
        )
    return Plan(
        rows=rows,
        stages=config.stages,
        ends=tuple(ends),
        warmup=warmup,
        min_lr_share=optim.min_lr_share,
        evaluate_every=max(1, math.ceil(config.evaluate.every_epochs * rows / batch)),
    )
