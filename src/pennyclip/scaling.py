"""Dynamic loss scaling: fp16's small gradients stay above zero.

Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2. The loss is multiplied before the backward
pass and the gradient divided after it, once. torch's own scaler has no floor (166 overflows in a
row bring it to exactly 0, and the next finite batch writes NaN weights), no patience, and does not
say whether an update was made.
"""

from typing import Any

from pennyclip.config import Config, LossScaling, Precision
from pennyclip.errors import RequestError

SCALED = ("fp16", "pure-fp16")


class LossScaler:
    """The factor on the loss: it halves at each overflow, and doubles after a long time without.

    An overflow is a loss or gradient that is not finite. (Factors 2 as by default; see
    `config.LossScaling`.)
    """

    def __init__(self, config: LossScaling) -> None:
        """
        Raises:
            RequestError: values under which the scale would not work.
        """
        for wrong, rule in (
            (config.floor < 1, "floor must be at least 1: below it, scaling loses gradients"),
            (config.start < config.floor, "start must not lie below floor"),
            (config.growth <= 1, "growth must be above 1"),
            (not 0 < config.backoff < 1, "backoff must lie between 0 and 1"),
            (config.interval < 1, "interval must be at least 1 update"),
            (config.patience < 1, "patience must be at least 1 overflow"),
        ):
            if wrong:
                raise RequestError(f"loss_scaling.{rule}; found {config}")
        self._config = config
        self.scale = config.start
        self.overflows = 0
        """In the whole run."""
        self.in_a_row = 0
        """Overflows since the last update."""
        self._since = 0
        """Updates since the scale last changed."""

    @property
    def exhausted(self) -> bool:
        """Whether so many batches in a row overflowed that a smaller scale won't help."""
        return self.in_a_row >= self._config.patience

    def updated(self) -> None:
        """An update was made."""
        self.in_a_row = 0
        self._since += 1
        if self._since == self._config.interval:
            self._set(self.scale * self._config.growth)

    def overflowed(self) -> None:
        """A batch overflowed, and no update was made from it."""
        self.overflows += 1
        self.in_a_row += 1
        self._set(max(self._config.floor, self.scale * self._config.backoff))

    def _set(self, scale: float) -> None:
        self.scale, self._since = scale, 0

    def state(self) -> dict[str, Any]:
        """What `load` takes."""
        return {
            "scale": self.scale,
            "overflows": self.overflows,
            "in_a_row": self.in_a_row,
            "since": self._since,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.overflows = state["scale"], state["overflows"]
        self.in_a_row, self._since = state["in_a_row"], state["since"]


def is_scaled(config: Config, precision: Precision) -> bool:
    """Whether the loss of a run in `precision` is scaled: some of it computes in fp16."""
    return precision in SCALED or any(own.precision == "fp16" for own in config.precision_of)


def make_scaler(config: Config, precision: Precision) -> LossScaler | None:
    """The scaler of a run in `precision`; None where the loss is not scaled.

    Raises:
        RequestError: `loss_scaling` says what would have no effect, or cannot work.
    """
    possible = config.precision == "auto" or is_scaled(config, config.precision)
    if not possible and config.loss_scaling != LossScaling():
        raise RequestError(
            f"loss_scaling would have no effect: precision = {config.precision} has float32's "
            "range. Leave it out, or set precision to fp16."
        )
    return LossScaler(config.loss_scaling) if is_scaled(config, precision) else None
