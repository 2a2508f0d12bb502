"""What every format is given, and what it answers."""

from dataclasses import dataclass
from pathlib import Path

from pennyclip.model.clip import CLIP

FOLDER = "{folder}"
"""Stands in a line of Python for where the export finally lies."""


@dataclass(frozen=True)
class Source:
    """A trained model in evaluation mode, on the CPU, and the checkpoint that it came from."""

    model: CLIP
    checkpoint: Path


@dataclass(frozen=True)
class Written:
    """How an export is used."""

    layout: str
    """What was written, in words."""
    python: str
    """A line that loads it, with `{folder}` for its place."""
    notes: tuple[str, ...] = ()
    """What whoever loads it must know."""
    inside: bool = False
    """The line works only where the working folder is the export."""

    def load_line(self, folder: Path) -> str:
        """The command that loads it from `folder`."""
        if self.inside:
            return f"cd '{folder}' && {self.load_line_inside}"
        return f'python -c "{self.python.replace(FOLDER, str(folder))}"'

    @property
    def load_line_inside(self) -> str:
        """The command that loads it where the working folder is the export."""
        return f'python -c "{self.python.replace(FOLDER, ".")}"'
