"""What a model is scored on by one number. Imports no torch: the command line reads it."""

from dataclasses import dataclass
from pathlib import Path

from pennyclip.config.keys import Evaluation


@dataclass(frozen=True)
class Task:
    """Retrieval on a split of a dataset (`data`), or zero-shot classification (`images`)."""

    data: Path | None = None
    """A prepared dataset: scored by the mean recall of retrieval."""
    split: str = Evaluation.split
    """Subset of the dataset."""
    images: Path | None = None
    """A folder with one folder a class: scored by the share classified right."""
    classes: Path | None = None
    """JSON object from folder name to class name, where they differ."""

    def __str__(self) -> str:
        if self.data is not None:
            return f"mean recall on '{self.split}' of {self.data}"
        return f"zero-shot top-1 on {self.images}"
