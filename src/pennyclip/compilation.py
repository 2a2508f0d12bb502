"""torch.compile, tried on the first updates of each stage and kept only where it is faster.

Two parts are timed apart and decided apart. The blocks of both towers are compiled one by one and
in place: blocks of one kind share their code, so it takes a minute and not many, and no name of a
parameter changes. Lengths are dynamic, because every batch has captions of other lengths. The other
part is the step of an optimizer that can be compiled: LAMB. What cannot be compiled runs as it is.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn

from pennyclip.errors import RequestError, RunError
from pennyclip.model.clip import CLIP
from pennyclip.model.recompute import image_blocks, text_blocks
from pennyclip.optim.lamb import Lamb

T = TypeVar("T")

EAGER = range(1, 4)  # updates timed as they are; the first only warms up. chosen: a median of 3
COMPILED = range(6, 9)  # and compiled; the two before compile, for one length and for any
TOWERS, OPTIMIZER = "towers", "optimizer"


@dataclass
class _Part:
    """Something that runs once an update and can be compiled."""

    name: str
    takes: str
    """What its seconds are of."""
    switch: Callable[[bool], None]
    """To compiled code, or back. Raises what the compiler raises."""
    seconds: list[float] = field(default_factory=list)
    compiling: float = 0.0
    """Seconds that switching itself took."""


class Compilation:
    """Times updates, and decides once a stage."""

    def __init__(self, wanted: bool, model: CLIP, event: Callable[..., None]) -> None:
        """
        Args:
            wanted: whether the run asks for it at all.
            model: whose blocks are compiled.
            event: told each decision.
        """
        self._wanted, self._model, self._event = wanted, model, event
        self._stage = 0
        self._parts: dict[str, _Part] = {}
        self._compiled: set[str] = set()
        self._step_began: float | None = None
        self._step_seconds: float | None = None
        self.kept: dict[int, dict[str, bool]] = {}
        """By number of stage and name of part, where it has been decided."""

    def enter_stage(self, number: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Begin a trial, or take what was decided before the run was broken off.

        Args:
            number: of the stage.
            step: at which it is entered.
            optimizer: the stage's own.
        """
        if not self._wanted:
            return
        self._stage = number
        towers = _Part(TOWERS, "an update without the optimizer's step", self._compile_towers)
        towers.switch(False)
        self._compiled = set()
        self._parts = {TOWERS: towers}
        if isinstance(optimizer, Lamb):
            self._parts[OPTIMIZER] = _Part(OPTIMIZER, "the optimizer's step", optimizer.compile)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        for part in self._parts.values():
            if self._decided(part):
                self._switch(part, step)

    def run(self, step: int, update: Callable[[], T]) -> T:
        """Make update `step`; one that fails compiled is made as it is, and so are those after."""
        if not self._wanted:
            return update()
        for part in self._trying():
            if len(part.seconds) == EAGER.stop and part.name not in self._compiled:
                self._switch(part, step)
        trying = self._trying()
        self._step_began = self._step_seconds = None
        start = _now() if trying else 0.0
        try:
            result = update()
        except Exception as error:
            # In the optimizer's step some weights may have moved; before it, nothing has changed.
            inside = self._step_began is not None and self._step_seconds is None
            asked = isinstance(error, RequestError | RunError)
            if TOWERS not in self._compiled or inside or asked:
                raise
            self._give_up(self._parts[TOWERS], step, error)
            return update()
        if trying:
            whole = _now() - start
            spent = {TOWERS: whole - (self._step_seconds or 0.0), OPTIMIZER: self._step_seconds}
            for part in trying:
                self._count(part, step, spent[part.name])
        return result

    def _trying(self) -> list[_Part]:
        return [p for p in self._parts.values() if p.name not in self.kept.get(self._stage, {})]

    def _decided(self, part: _Part) -> bool:
        return self.kept.get(self._stage, {}).get(part.name, False)

    def _count(self, part: _Part, step: int, seconds: float | None) -> None:
        if seconds is None:  # the update was skipped
            return
        part.seconds.append(seconds)
        if len(part.seconds) == COMPILED.stop:
            self._decide(part, step)

    def _decide(self, part: _Part, step: int) -> None:
        eager, compiled = (median(part.seconds[i] for i in r) for r in (EAGER, COMPILED))
        spent = part.compiling + sum(part.seconds[EAGER.stop : COMPILED.start])
        kept = compiled < eager
        self._keep(part, kept)
        if not kept:
            self._off(part)
        self._event(
            step,
            "compiled" if kept else "not compiled",
            f"{part.name}: {part.takes} takes {compiled:.3g} s compiled and {eager:.3g} s as it "
            f"is; compiling took {spent:.0f} s. It is {'kept' if kept else 'left out'} in this "
            "stage.",
            part=part.name,
            eager_seconds=eager,
            compiled_seconds=compiled,
        )

    def _give_up(self, part: _Part, step: int, error: Exception) -> None:
        self._keep(part, False)
        self._off(part)
        said = " ".join(str(error).split("\n")[:2]).strip()  # the first may only be a headline
        self._event(
            step,
            "not compiled",
            f"compiling the {part.name} failed ({type(error).__name__}: {said}). The stage goes on "
            "without.",
            part=part.name,
        )

    def _keep(self, part: _Part, kept: bool) -> None:
        self.kept.setdefault(self._stage, {})[part.name] = kept

    def _switch(self, part: _Part, step: int) -> None:
        start = time.perf_counter()
        try:
            part.switch(True)
        except Exception as error:
            self._give_up(part, step, error)
            return
        part.compiling = time.perf_counter() - start
        self._compiled.add(part.name)

    def _off(self, part: _Part) -> None:
        part.switch(False)
        self._compiled.discard(part.name)

    def _compile_towers(self, on: bool) -> None:
        for block in compiled_blocks(self._model):
            if on:
                block.compile(dynamic=True)
            else:
                block._compiled_call_impl = None  # how torch marks a module that is not compiled

    def _before_step(self, *_: Any) -> None:
        self._step_began = _now() if self._trying() else 0.0

    def _after_step(self, *_: Any) -> None:
        assert self._step_began is not None
        self._step_seconds = _now() - self._step_began if self._trying() else 0.0


def compiled_blocks(model: CLIP) -> list[nn.Module]:
    """What is compiled of the towers: the repeated blocks of both trunks."""
    return [*image_blocks(model.visual.trunk), *text_blocks(model.text)]


def _now() -> float:
    """Seconds, when all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
