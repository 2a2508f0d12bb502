"""The course of the learning rate after its warm-up, from the peak (1) to the floor.

Each function takes the share of the course that is behind (0 to 1) and returns how much of the way
from the floor to the peak is left.
"""

import math
from collections.abc import Callable

Schedule = Callable[[float, float], float]
"""(share of the course behind, share of it at which the cooldown begins) to a share of the peak."""


def cosine(progress: float, cooldown: float) -> float:
    """Loshchilov and Hutter 2017 (arXiv 1608.03983), equation 5, without restarts."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def linear(progress: float, cooldown: float) -> float:
    """A straight line to the floor."""
    return 1 - progress


def constant(progress: float, cooldown: float) -> float:
    """The peak until the end."""
    return 1.0


def wsd(progress: float, cooldown: float) -> float:
    """Warm-up, stable, decay: the peak, then down with 1 - sqrt(share of the cooldown behind).

    Haegele et al. 2024 (arXiv 2405.18392), section 3: as good as a cosine of known length, and the
    length may be left open until the cooldown begins.
    """
    if progress <= cooldown:
        return 1.0
    return 1 - math.sqrt((progress - cooldown) / (1 - cooldown))


SCHEDULES: dict[str, Schedule] = {
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
    "wsd": wsd,
}
"""By the name that a recipe uses."""
