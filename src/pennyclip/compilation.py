"""torch.compile, tried on the first updates of each stage and kept only where it is faster.

The blocks of both towers are compiled one by one and in place: blocks of one kind share their code,
so it takes a minute and not many, and no name of a parameter changes. Lengths are dynamic, because
every batch has captions of other lengths. What cannot be compiled runs as it is.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import torch
from torch import nn

from pennyclip.errors import RequestError, RunError
from pennyclip.model.clip import CLIP
from pennyclip.model.recompute import image_blocks, text_blocks

T = TypeVar("T")

EAGER = range(1, 4)  # updates timed as they are; the first only warms up. chosen: a median of 3
COMPILED = range(6, 9)  # and compiled; the two before compile, for one length and for any


class Compilation:
    """Times updates, and decides once a stage."""

    def __init__(self, wanted: bool, model: CLIP, event: Callable[..., None]) -> None:
        """
        Args:
            wanted: whether the run asks for it at all.
            model: whose blocks are compiled.
            event: told the decision.
        """
        self._wanted, self._model, self._event = wanted, model, event
        self._seconds: list[float] = []
        self._stage = 0
        self._compiled = False
        self.kept: dict[int, bool] = {}
        """By number of stage, where it has been decided."""

    def enter_stage(self, number: int) -> None:
        """Begin a trial, or take what was decided before the run was broken off."""
        self._stage, self._seconds = number, []
        self._compile(self._wanted and self.kept.get(number, False))

    def run(self, step: int, update: Callable[[], T]) -> T:
        """Make update `step`; one that fails compiled is made as it is, and so are those after."""
        if not self._wanted:
            return update()
        trying = self._stage not in self.kept
        if trying and len(self._seconds) == EAGER.stop:
            self._compile(True)
        start = _now() if trying else 0.0
        try:
            result = update()
        except Exception as error:
            if not self._compiled or isinstance(error, RequestError | RunError):
                raise
            # An update that raises has changed nothing yet.
            self._give_up(step, error)
            return update()
        if trying and self._stage not in self.kept:
            self._seconds.append(_now() - start)
            if len(self._seconds) == COMPILED.stop:
                self._decide(step)
        return result

    def _give_up(self, step: int, error: Exception) -> None:
        self.kept[self._stage] = False
        self._compile(False)
        lines = str(error).strip().splitlines() or ["no message"]
        self._event(
            step,
            "not compiled",
            f"compiling failed ({type(error).__name__}: {lines[0]}). The stage goes on without.",
        )

    def _decide(self, step: int) -> None:
        eager, compiled = (median(self._seconds[i] for i in r) for r in (EAGER, COMPILED))
        spent = sum(self._seconds[EAGER.stop : COMPILED.start])
        kept = compiled < eager
        self.kept[self._stage] = kept
        self._compile(kept)
        self._event(
            step,
            "compiled" if kept else "not compiled",
            f"an update takes {compiled:.3g} s compiled and {eager:.3g} s as it is; compiling took "
            f"{spent:.0f} s. It is {'kept' if kept else 'left out'} in this stage.",
            eager_seconds=eager,
            compiled_seconds=compiled,
        )

    def _compile(self, on: bool) -> None:
        self._compiled = on
        for block in compiled_blocks(self._model):
            if on:
                block.compile(dynamic=True)
            else:
                block._compiled_call_impl = None  # how torch marks a module that is not compiled


def compiled_blocks(model: CLIP) -> list[nn.Module]:
    """What is compiled: the repeated blocks of both trunks."""
    return [*image_blocks(model.visual.trunk), *text_blocks(model.text)]


def _now() -> float:
    """Seconds, when all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
