"""What is remembered of how a run went, for `watch.py` to judge by."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pennyclip.training.watch.collapse import Collapse
from pennyclip.training.watch.course import LossCourse
from pennyclip.training.watch.evidence import Evidence
from pennyclip.training.watch.unreadable import Unreadable


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
    collapse: Collapse = field(default_factory=Collapse)
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
    unreadable: Unreadable = field(default_factory=Unreadable)
    told: dict[str, int] = field(default_factory=dict)
    """The step at which each warning was last given."""
    troubles: list[int] = field(default_factory=list)
    """The first batches of the run's first trouble and of its latest one."""

    def trouble(self, since: int) -> None:
        """Something is wrong from batch `since` on, which somebody will want to look at."""
        self.troubles = [*self.troubles[:1], since]

    @property
    def worth_a_look(self) -> list[int]:
        """Batches before which the newest checkpoint stays: of `troubles`, and of what may become
        one. At most 3."""
        doubts = [self.course.since, self.collapse.since, *self.not_finite[:1]]
        return self.troubles + sorted(batch for batch in doubts if batch is not None)[:1]

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> "Health":
        parts = {
            "course": LossCourse(**state["course"]),
            "evidence": Evidence(**state["evidence"]),
            "collapse": Collapse(**state["collapse"]),
            "unreadable": Unreadable(**state["unreadable"]),
        }
        return cls(**dict(state) | parts)

    def state(self) -> dict[str, Any]:
        return asdict(self)
