"""A peak learning rate from a range test (Smith 2017, arXiv 1506.01186, section 3.3).

The recipe's own updates are made with rates that grow, by a constant factor an update, from a
thousandth of the recipe's to a hundred times them. First the loss falls too slowly to be seen, then
it falls, and then the rates are too high and it climbs. The suggestion is a tenth of the rates at
which it was lowest (Howard and Gugger 2020, fastai's rule): there it was still falling well. A loss
that has not clearly climbed again suggests nothing.

Nothing is saved: the model that the test leaves is thrown away.
"""

import itertools
import math
import statistics
from dataclasses import dataclass

from pennyclip.base.errors import RequestError, RunError
from pennyclip.commands.bench.workbench import open_workbench, stage_number
from pennyclip.config.keys import Config, Stage
from pennyclip.config.presets import beginning, nearest
from pennyclip.evaluation.features import Progress, silent

LOW, HIGH = 1e-3, 1e2
"""From where to where, as factors of the recipe's rates."""
BELOW_LOWEST = 10.0
"""The suggestion is this much below the rates of the lowest loss."""
AROUND = 3
"""Updates before and after that are averaged. Chosen: of 100 updates, a third of a decade."""
DIVERGED = 4.0
"""A loss of this many times the lowest ends the test (fastai's)."""
FELL = 3.0
"""Standard deviations of the averages' noise by which the loss must have fallen. Chosen."""
LINES, BAR = 20, 40  # of the drawing


@dataclass(frozen=True)
class RateTest:
    """What a range test found."""

    stage: str
    lr: float
    """The recipe's `optim.lr`."""
    factors: tuple[float, ...]
    """Of the recipe's rates, an update."""
    losses: tuple[float, ...]
    """Of these updates, averaged over their neighbours."""
    suggested_factor: float | None
    """What to multiply the recipe's rates by; None: the test does not say."""
    suggested_rates: dict[str, float]
    """Peak rates by part of the model: the highest of its layers."""
    finding: str
    preset: str
    """The published setting that is nearest, with its rate for this batch unless that is far; or
    that there is none of this kind of start and optimizer."""

    def __str__(self) -> str:
        low, high = min(self.losses), max(self.losses)
        lines = [self.stage, "", f"{'factor':>9}{'optim.lr':>11}{'loss':>8}"]
        for i in range(0, len(self.losses), max(1, math.ceil(len(self.losses) / LINES))):
            factor, loss = self.factors[i], self.losses[i]
            bar = "#" * round(BAR * (loss - low) / max(high - low, 1e-9))
            lines.append(f"{factor:>9.2g}{self.lr * factor:>11.2e}{loss:>8.3f}  {bar}".rstrip())
        lines += ["", self.finding]
        rates = ", ".join(f"{part} {rate:.1e}" for part, rate in self.suggested_rates.items())
        lines += [f"peak rates by part: {rates}"] * bool(rates)
        lines += [f"published: {self.preset}"]
        return "\n".join(lines)


def find_rate(
    config: Config, *, stage: int | None = None, updates: int = 100, progress: Progress = silent
) -> RateTest:
    """Run the range test of a recipe.

    Args:
        config: with its data.
        stage: from 1; None: the first. The model is what the run starts from in either case.
        updates: of the whole test.

    Raises:
        RequestError: the recipe could not be trained as it stands.
        RunError: not even the first updates gave a finite loss.
    """
    if updates < 10 * AROUND:
        raise RequestError(f"updates = {updates}: expected at least {10 * AROUND}")
    number = stage_number(config, stage, 0)
    bench = open_workbench(config, number, progress)
    scale = bench.stage.lr_factor * bench.plan.lr_scale
    # Overflows in a row that only say that the loss scale is still too large.
    patience = config.loss_scaling.patience if bench.scaler else 1
    peaks = [group["base_lr"] * scale for group in bench.setup.optimizer.param_groups]
    factors: list[float] = []
    losses: list[float] = []
    ended, micro_batch, overflows = "", config.micro_batch, 0
    for step, batch in enumerate(bench.setup.loader.batches(0, updates)):
        factor = LOW * (HIGH / LOW) ** (step / (updates - 1))
        for group, peak in zip(bench.setup.optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        record = bench.update(
            bench.setup,
            batch,
            step,
            bench.scaler,
            micro_batch,
            mask_ratio=bench.stage.mask_range[0],
        )
        micro_batch = record["micro_batch"]
        overflows = overflows + 1 if record["skipped"] else 0
        if overflows:
            if overflows < patience:
                continue
            ended = f"at {factor:.2g} times the recipe's rates the loss or its gradient overflowed"
            break
        factors.append(factor)
        losses.append(float(record["loss"]))
        progress("rate", step + 1, updates)
        if losses[-1] > DIVERGED * min(losses):
            ended = f"at {factor:.2g} times the recipe's rates the loss was {losses[-1]:.2f}"
            break
    if len(losses) < 4 * AROUND:
        raise RunError(
            f"only {len(losses)} of the first updates could be made, with rates from "
            f"{LOW:g} times the recipe's: {ended or 'the others overflowed'}. Lower optim.lr; or "
            "look at the data (a run names the tensor and the rows)."
        )
    smooth = smoothed(losses)
    factor, finding = suggest(factors, losses, smooth)
    rates: dict[str, float] = {}
    for group, peak in zip(bench.setup.optimizer.param_groups, peaks, strict=True):
        if factor is not None:
            rates[group["part"]] = max(rates.get(group["part"], 0.0), peak * factor)
    if factor is not None:
        finding += f": optim.lr = {config.optim.lr * factor:.1e}"
        if any(g["base_lr"] != config.optim.lr for g in bench.setup.optimizer.param_groups):
            finding += f", and every other rate of the recipe times {factor:.2g} as well"
    return RateTest(
        stage=f"{bench.title}, batches of {config.batch_size}, "
        f"{len(losses)} updates in {bench.precision}",
        lr=config.optim.lr,
        factors=tuple(factors),
        losses=tuple(smooth),
        suggested_factor=factor,
        suggested_rates=rates,
        finding=". ".join(x for x in (finding, ended) if x),
        preset=_published(config, bench.stage),
    )


def _published(config: Config, stage: Stage) -> str:
    found = nearest(config, stage)
    if found is None:
        return (
            f"no setting known for this kind of start ({beginning(config, stage)}) with "
            f"{config.optim.name}; all that are: pennyclip list presets"
        )
    name, preset = found
    rate = preset.scaled(config.batch_size)
    here = f", {rate:.1e} at batch {config.batch_size:,}" if rate else ""
    return f"{name}{here} ({preset})"


def smoothed(losses: list[float]) -> list[float]:
    """Each loss averaged with its neighbours, as many on both sides."""
    means = []
    for i in range(len(losses)):
        reach = min(AROUND, i, len(losses) - 1 - i)
        means.append(statistics.fmean(losses[i - reach : i + reach + 1]))
    return means


def suggest(
    factors: list[float], losses: list[float], smooth: list[float]
) -> tuple[float | None, str]:
    """The factor that the test suggests, if it does, and why.

    Args:
        factors: growing.
        losses: of the updates with these factors.
        smooth: the same, smoothed.
    """
    whole = range(AROUND, len(smooth) - AROUND)  # averages over as many as they should be
    lowest = min(whole, key=smooth.__getitem__)
    begin = statistics.fmean(losses[: 2 * AROUND])
    jumps = [a - b for a, b in zip(losses, smooth, strict=True)][: lowest + AROUND]
    noise = statistics.pstdev(jumps) / (2 * AROUND + 1) ** 0.5
    if begin - smooth[lowest] <= FELL * noise:
        return None, (
            f"the loss never fell clearly: from {begin:.3f} to {smooth[lowest]:.3f}, and such "
            f"averages are off by {noise:.3f}. More --updates or a larger batch_size may show "
            "it; or nothing is learned here"
        )
    if factors[-1] >= HIGH * 0.9 and smooth[lowest] >= smooth[whole[-1]] - FELL * noise:
        return None, (
            f"the loss still fell, or stayed down, at the end, {factors[-1]:.2g} times the "
            f"recipe's rates: {len(factors)} updates did not show where it would climb, so they "
            "suggest no rate. Keep the recipe's, or try more --updates"
        )
    factor = factors[lowest] / BELOW_LOWEST
    falls = [a - b for a, b in itertools.pairwise(smooth[: lowest + 1])]
    steepest = factors[max(range(len(falls)), key=falls.__getitem__)]
    return factor, (
        f"lowest loss {smooth[lowest]:.3f} at {factors[lowest]:.2g} times the recipe's rates, "
        f"steepest fall at {steepest:.2g}; a tenth of the lowest is suggested, {factor:.2g} times"
    )
