"""What is remembered of how a run went, for `stability.py` to judge by."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pennyclip.evidence import Evidence
from pennyclip.loss_course import LossCourse


@dataclass
class Health:
    """What is remembered. Saved with the run, so that a resumed one decides alike."""

    stage: int = -1
    lr_factor: float = 1.0
    rollbacks: int = 0
    updates: int = 0
    """Made since the last rollback."""
    first_trouble: tuple[str, int] | None = None
    """Why the run was rolled back for the first time, and which batch was the first."""
    course: LossCourse = field(default_factory=LossCourse)
    evidence: Evidence = field(default_factory=Evidence)
    spreads: list[float] = field(default_factory=list)
    """By how many nats the logits of the last batches differed, at most."""
    flat_since: int | None = None
    """The first batch since which they hardly did."""
    update_rms: float = 0.0
    """The largest since it was last looked at."""
    not_finite: list[int] = field(default_factory=list)
    """The last batches, if none of them gave an update."""
    skips: dict[int, str] = field(default_factory=dict)
    """Those among the last batches that gave no update, and what was not finite in each."""
    held: float = 0.0
    """The loss scale of the last update; 0: none has held since an overflow."""
    overflows: list[int] = field(default_factory=list)
    """Batches that overflowed at a scale that had held."""
    unreadable: list[int] = field(default_factory=list)
    """Rows, over the whole run."""
    unreadable_counts: list[int] = field(default_factory=list)
    """In each of the last batches."""
    first_unreadable: str = ""
    told: dict[str, int] = field(default_factory=dict)
    """The step at which each warning was last given."""

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> "Health":
        parts = {
            "course": LossCourse(**state["course"]),
            "evidence": Evidence(**state["evidence"]),
        }
        return cls(**dict(state) | parts)

    def state(self) -> dict[str, Any]:
        return asdict(self)
