"""Dynamic loss scaling: fp16's small gradients stay above zero.

Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2. The loss is multiplied before the backward
pass and the gradient divided after it, once. torch's own scaler has no floor (166 overflows in a
row bring it to exactly 0, and the next finite batch writes NaN weights), and does not say whether
an update was made. How many overflows in a row are too many is for the run's watch to judge.
"""

from math import inf
from typing import Any

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Config, LossScaling, Precision

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
        for key, right, rule in (
            ("floor", 1 <= config.floor < inf, "at least 1: below it, scaling loses gradients"),
            ("start", config.floor <= config.start < inf, f"at least floor, {config.floor:g}"),
            ("growth", 1 < config.growth < inf, "a factor above 1"),
            ("backoff", 0 < config.backoff < 1, "a factor between 0 and 1"),
            ("interval", config.interval >= 1, "at least 1 update"),
            ("patience", config.patience >= 1, "at least 1 overflow"),
        ):
            if not right:
                raise RequestError(
                    f"loss_scaling.{key} = {getattr(config, key):g}: expected {rule}"
                )
        self._config = config
        self.scale = config.start
        self.overflows = 0
        """In the whole run."""
        self._since = 0
        """Updates since the scale last changed."""

    def updated(self) -> None:
        """An update was made."""
        self._since += 1
        if self._since == self._config.interval:
            self._set(self.scale * self._config.growth)

    def overflowed(self) -> None:
        """A batch overflowed, and no update was made from it."""
        self.overflows += 1
        self._set(max(self._config.floor, self.scale * self._config.backoff))

    def _set(self, scale: float) -> None:
        self.scale, self._since = scale, 0

    def state(self) -> dict[str, Any]:
        """What `load` takes."""
        return {"scale": self.scale, "overflows": self.overflows, "since": self._since}

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.overflows = state["scale"], state["overflows"]
        self._since = state["since"]


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
    scaler = LossScaler(config.loss_scaling)  # or it says what is wrong, on any hardware
    return scaler if is_scaled(config, precision) else None
