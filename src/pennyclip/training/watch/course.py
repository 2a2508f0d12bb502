"""The course of a run's loss: when it deviates, when that is a spike, and when it lasts."""

from dataclasses import dataclass, field
from statistics import fmean, median, pstdev

SIGMAS = 3.2
"""A loss this many standard deviations above its running mean deviates: Wortsman et al. 2023
(arXiv 2304.13013)."""
SHORT = 10
"""Batches that are judged together, as in the paper."""
SPIKE = 3
"""Deviations among them that make a spike. The paper asks for 2, and knows the loss's spread from
more; by 30 losses, normal noise brings 2 together once in 7,000 batches, 3 in 70,000."""
LONG = 30
"""Losses that say what is normal. Chosen: among more, an early fall of the loss hides a rise."""
ENOUGH = 20
"""Of them, before a single loss can deviate from them. Chosen."""
SMALLEST_SIGMA = 0.01
"""As a share of guessing's loss. Chosen: a loss that hardly varies makes a spike of nothing."""
LOST = 0.25
"""Share of what was learnt whose loss makes a spike a lasting one. Chosen: noise and the bump at
the end of a warm-up stay below, and smaller spikes mend themselves."""
SMALLEST_RISE = 0.1
"""Of a lasting spike, as a share of guessing's loss. Chosen: early on, half of what was learnt is
little."""
SETTLED = 50
"""Batches after which what a spike has left is the new normal, unless it lasts. Chosen: 5 times
`SHORT`, so one that mends has mostly mended; and no more than these go unsaved because of it."""
WORSE = 1.25
"""Loss, in guessing's, that nothing recovers from; and before it is known what is normal, one that
says that the rate is too high. Chosen: of 24 starts from random weights, those with a fitting
warm-up rose to 1.14 at most, those with one of 1 to 3 updates to 1.36 at least."""


@dataclass
class LossCourse:
    """The losses of a run so far, as far as they are needed."""

    first: list[float] = field(default_factory=list)
    """The first `SHORT` losses."""
    calm: list[float] = field(default_factory=list)
    """The last `LONG` that did not deviate, or had become the new normal."""
    last: list[float] = field(default_factory=list)
    """The last `SHORT`."""
    deviating: list[bool] = field(default_factory=list)
    """Whether these deviate."""
    since: int | None = None
    """The batch of the first deviation that is still remembered."""
    spike: bool = False
    """Whether they are a spike."""
    fresh: bool = False
    """Whether they are one, and began less than `SETTLED` batches ago."""
    lasting: bool = False
    """Whether more than half of them deviate, so far that it is not expected to mend."""
    rough: bool = False
    """Whether the last loss was `WORSE` times guessing's before it was known what is normal."""
    entering: bool = False
    """Whether the next loss is the first of a stage."""

    @property
    def normal(self) -> float:
        """The running mean."""
        return fmean(self.calm or self.first)

    def enter_stage(self) -> None:
        """A stage begins. Its first loss, before any update of its own, says whether what was
        normal still is; if not, that has to be learnt anew."""
        self.entering = True

    def see(self, step: int, loss: float, guessing: float) -> bool:
        """Take in the loss of batch `step`; whether a spike shows for the first time.

        Args:
            guessing: what a model would lose that knows nothing; 0 where that is not known.
        """
        if len(self.first) < SHORT:
            self.first.append(loss)
        start = fmean(self.first)
        self.rough = len(self.calm) < ENOUGH and loss > WORSE * max(self.first[0], guessing) > 0
        guessing, normal = max(start, guessing), self.normal
        known = len(self.calm) >= ENOUGH
        if known:
            limit = normal + SIGMAS * max(pstdev(self.calm), SMALLEST_SIGMA * guessing)
            lasts = normal + max(LOST * (start - normal), SMALLEST_RISE * guessing)
        else:
            limit = lasts = WORSE * guessing
        deviates = loss > limit
        if self.entering and deviates:
            self.calm, limit = [], WORSE * guessing
            self.forget_spike()
            deviates, known, lasts = loss > limit, False, limit
        self.entering = False
        if deviates:
            self.since = step if self.since is None else self.since
        settled = self.since is not None and step - self.since >= SETTLED
        if not deviates or (settled and loss <= lasts):
            self.calm = [*self.calm, loss][-LONG:]
        self.last = [*self.last, loss][-SHORT:]
        self.deviating = [*self.deviating, deviates][-SHORT:]
        count = sum(self.deviating)
        self.lasting = count > SHORT // 2 and median(self.last) > max(limit, lasts)
        before = self.spike
        self.spike = count > 0 and (before or (known and count >= SPIKE))
        self.fresh = self.spike and not settled
        if count == 0:
            self.since = None
        return self.spike and not before

    def forget_spike(self) -> None:
        """The run has gone back to before it."""
        self.last, self.deviating, self.since = [], [], None
        self.spike = self.fresh = self.lasting = self.rough = False
