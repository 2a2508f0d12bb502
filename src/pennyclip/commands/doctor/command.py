"""The command `pennyclip doctor`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from pennyclip.commands.answer import Answer, Json


@dataclass(frozen=True)
class Doctor:
    """What happened to a run and what to do about it; or one of its batches computed again."""

    run_: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run's folder."""
    replay: int | None = None
    """A step: its batch again, with the weights that the run had then."""
    json: Json = False

    def run(self) -> Answer:
        if self.replay is None:
            from pennyclip.commands.doctor.events import diagnose

            return diagnose(self.run_)
        from pennyclip.commands.doctor.replay import replay

        return replay(self.run_, self.replay)
