"""torch.compile, tried on the first updates of each stage and kept only where it is faster.

Two parts are timed apart and decided apart. The blocks of both towers are compiled one by one and
in place: blocks of one kind share their code, so it takes a minute and not many, and no name of a
parameter changes. Lengths are dynamic, because every batch has captions of other lengths. The other
part is the step of an optimizer that can be compiled: LAMB. What cannot be compiled runs as it is,
and so does evaluation.

What is kept was decided by a clock, and compiled code rounds otherwise. So a decision is part of
the run's record: it is in every checkpoint, and a resumed run takes it over; but the same request
run once more may decide otherwise, and then differs in the last digits.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn

from pennyclip.model.clip import CLIP
from pennyclip.model.recompute import image_blocks, text_blocks
from pennyclip.model.text_clip import CausalAttention
from pennyclip.optim.lamb import Lamb

T = TypeVar("T")

EAGER = range(1, 4)
"""Updates of a trial that are timed as they are. Chosen: a median of 3; the first warms up."""
COMPILED = range(6, 9)
"""And those timed compiled. Chosen: as many, behind two in which most of the compiling happens."""
MARGIN = 0.95
"""Compiled is kept below this share of the time as it is. Chosen: where single updates scatter by
2 %, the ratio of two medians of 3 does by 1.9 %, so that code that is no faster is kept once in 200
trials; and what gains less is not worth results that depend on a clock."""
TOWERS, OPTIMIZER = "towers", "optimizer"


@dataclass
class _Part:
    """Something that runs once an update and can be compiled."""

    name: str
    takes: str
    """What its seconds are of."""
    switch: Callable[[bool], None]
    """To compiled code, or back. Raises what the compiler raises."""
    compiled: bool = False
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
        self._step_began: float | None = None
        self._step_seconds: float | None = None
        self.kept: dict[int, dict[str, bool]] = {}
        """By number of stage and name of part, where it has been decided."""

    def enter_stage(self, number: int, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Begin a trial, or take what was decided before the run was broken off or rolled back.

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
        self._parts = {TOWERS: towers}
        if isinstance(optimizer, Lamb):
            self._parts[OPTIMIZER] = _Part(OPTIMIZER, "the optimizer's step", optimizer.compile)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        for part in self._parts.values():
            if self._decided().get(part.name):
                self._compile(part, step)

    def run(self, step: int, update: Callable[[], T]) -> T:
        """Make update `step`. One that fails because it is compiled is made as it is, and so are
        those after.

        Args:
            step: updates made before.
            update: may be called twice.

        Raises:
            Exception: what the update raises as it is, or compiled where that is not the reason.
        """
        if not self._wanted:
            return update()
        for part in self._trying():
            if len(part.seconds) == EAGER.stop and not part.compiled:
                self._compile(part, step)
        trying = self._trying()
        self._step_began = self._step_seconds = None
        start = _now() if trying else 0.0
        try:
            result = update()
        except Exception as error:
            if not self._may_be_the_compilers(error):
                raise
            failure = _headline(error)
            cause = "compiling them" if _of_the_compiler(error) else "an update with them compiled"
        else:
            if trying:
                whole = _now() - start
                spent = {TOWERS: whole - (self._step_seconds or 0.0), OPTIMIZER: self._step_seconds}
                for part in trying:
                    self._count(part, step, spent[part.name])
            return result
        # Not before the error is gone is there room again: it holds all that was computed.
        towers = self._parts[TOWERS]
        self._off(towers)
        result = update()  # what fails here as well was not the compiler's, and is raised
        self._leave_out(towers, step, f"{cause} failed ({failure}), and as they are they work")
        return result

    def _may_be_the_compilers(self, error: Exception) -> bool:
        """Whether to try an update once more as it is, because of an error of the compiled towers.

        The compiler's own errors: at any update, since other lengths may be compiled late. Others
        only in the trial, where the code is new. None once the optimizer's step has begun, which
        may have moved weights. Before it nothing has changed, but for the running statistics of a
        BatchNorm: they see the batch twice.
        """
        towers = self._parts[TOWERS]
        if not towers.compiled or self._step_began is not None:
            return False
        return towers in self._trying() or _of_the_compiler(error)

    def _decided(self) -> dict[str, bool]:
        return self.kept.setdefault(self._stage, {})

    def _trying(self) -> list[_Part]:
        return [part for part in self._parts.values() if part.name not in self._decided()]

    def _count(self, part: _Part, step: int, seconds: float | None) -> None:
        if seconds is None:  # the update was skipped
            return
        part.seconds.append(seconds)
        if len(part.seconds) == COMPILED.stop:
            self._decide(part, step)

    def _decide(self, part: _Part, step: int) -> None:
        eager, compiled = (median(part.seconds[i] for i in r) for r in (EAGER, COMPILED))
        spent = part.compiling + sum(part.seconds[EAGER.stop : COMPILED.start])
        kept = compiled < MARGIN * eager
        self._decided()[part.name] = kept
        if not kept:
            self._off(part)
        end = "kept" if kept else f"left out, not being {1 - MARGIN:.0%} faster,"
        self._event(
            step,
            "compiled" if kept else "not compiled",
            f"{part.name}: {part.takes} takes {compiled:.3g} s compiled and {eager:.3g} s as it "
            f"is; compiling took {spent:.0f} s. It is {end} in this stage.",
            part=part.name,
            eager_seconds=eager,
            compiled_seconds=compiled,
        )

    def _leave_out(self, part: _Part, step: int, reason: str) -> None:
        self._decided()[part.name] = False
        self._off(part)
        message = f"{part.name}: {reason}. The stage goes on without."
        self._event(step, "not compiled", message, part=part.name)

    def _compile(self, part: _Part, step: int) -> None:
        start = time.perf_counter()
        try:
            part.switch(True)
        except Exception as error:
            self._leave_out(part, step, f"compiling failed ({_headline(error)})")
            return
        part.compiling = time.perf_counter() - start
        part.compiled = True

    def _off(self, part: _Part) -> None:
        part.switch(False)
        part.compiled = False

    def _compile_towers(self, on: bool) -> None:
        for block in compiled_blocks(self._model):
            # Where torch's `Module.compile` puts its own; None: not compiled.
            block._compiled_call_impl = _in_training(self._model, block) if on else None

    def _before_step(self, *_: Any) -> None:
        self._step_began = _now() if self._trying() else 0.0

    def _after_step(self, *_: Any) -> None:
        assert self._step_began is not None
        self._step_seconds = _now() - self._step_began if self._trying() else 0.0


def compiled_blocks(model: CLIP) -> list[nn.Module]:
    """What is compiled of the towers: the repeated blocks of both trunks.

    Without those of CLIP's text transformer that have adapters: peft changes their fused
    `in_proj_weight` anew in each call, which torch cannot follow.
    """
    blocks = [*image_blocks(model.visual.trunk), *text_blocks(model.text)]
    return [block for block in blocks if not any(map(_adapts_attention, block.modules()))]


def _adapts_attention(module: nn.Module) -> bool:
    return isinstance(getattr(module, "base_layer", None), CausalAttention)


def _in_training(model: CLIP, block: nn.Module) -> Callable[..., Any]:
    """A block's call: compiled while the model is in training mode.

    Evaluation would compile anew, where nobody times it or catches what fails; and compiled code
    passes over hooks, by which the first layer is found whose output is not finite.
    """
    plain = block._call_impl
    compiled = torch.compile(plain, dynamic=True)

    def call(*inputs: Any, **named: Any) -> Any:
        return (compiled if model.training else plain)(*inputs, **named)

    return call


def _of_the_compiler(error: Exception) -> bool:
    """Whether torch's compiler has raised it: what was seen of torch 2.14.

    Everything of a backend arrives as BackendCompilerFailed or InductorError, both of
    TorchDynamoException; three others pass as they are (`torch/_dynamo/convert_frame.py`). An error
    of the code that is compiled arrives as itself, or as TorchRuntimeError, also of Dynamo's: the
    same update uncompiled then raises it plainly.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # takes a second
    from torch.fx.experimental.symbolic_shapes import (
        ConstraintViolationError,
        GuardOnDataDependentSymNode,
    )

    return isinstance(
        error,
        TorchDynamoException
        | FailOnRecompileLimitHit
        | ConstraintViolationError
        | GuardOnDataDependentSymNode,
    )


def _headline(error: Exception) -> str:
    """Its class and first two lines: the first alone may be a title."""
    return f"{type(error).__name__}: {' '.join(str(error).split(chr(10))[:2]).strip()}"


def _now() -> float:
    """Seconds, when all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
