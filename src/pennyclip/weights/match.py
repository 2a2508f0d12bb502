"""What of a weights file went where: every key and every parameter is accounted for."""

from dataclasses import dataclass, field
from typing import Any

from pennyclip.base.errors import RequestError
from pennyclip.weights.describe import Architecture

SHOWN = 8  # keys of one kind that an error message lists. chosen: a screen


@dataclass(frozen=True)
class LayerShare:
    """How much of one layer was loaded, in numbers (elements of tensors)."""

    name: str
    values: int
    loaded: int


@dataclass(frozen=True)
class Match:
    """How a file fits a tower. Names of parameters are those of the whole model."""

    tower: str
    file: str
    layout: str
    trained: str
    """What the weights were trained for, as far as the file says."""
    matched: dict[str, str] = field(default_factory=dict)
    """Key of the file -> name of our parameter, copied as it is."""
    resampled: dict[str, str] = field(default_factory=dict)
    """Key of the file -> how it was brought to another size."""
    derived: dict[str, str] = field(default_factory=dict)
    """Key of the file -> why the model computes it itself."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Key of the file -> why it is not used."""
    left_over: dict[str, str] = field(default_factory=dict)
    """Key of the file -> why it found no place."""
    new: list[str] = field(default_factory=list)
    """Parameters that the file says nothing about and that may start from random: the head, and
    what the recipe names."""
    missing: list[str] = field(default_factory=list)
    """Parameters of the trunk that the file should have held."""
    layers: list[LayerShare] = field(default_factory=list)
    """The trunk's layers from the input up, then the head."""
    architecture: Architecture | None = None
    """Of the file; None: not a vision transformer."""
    differences: list[str] = field(default_factory=list)
    """Where the tower is built otherwise than the file."""
    conflicts: list[str] = field(default_factory=list)
    """Those of the differences that fit by shape and would still compute something else."""

    note: str | None = None
    """What the file leaves open and had to be guessed."""

    @property
    def share(self) -> float:
        """Of the trunk's values, how many were loaded."""
        trunk = [layer for layer in self.layers if layer.name != "head"]
        return sum(layer.loaded for layer in trunk) / sum(layer.values for layer in trunk)

    @property
    def fits(self) -> bool:
        return not (self.left_over or self.missing or self.conflicts) and self.share > 0

    def check(self) -> None:
        """Refuse a file that does not fit.

        The rule is stricter than a share: of a trunk nothing may be missing, for what is missing
        can be small (EVA-02's inner norms are 0.02 % of it) and still spoil it.

        Raises:
            RequestError: keys are left over, or the trunk was not loaded wholly.
        """
        if self.fits:
            return
        lines = [f"  {line}" for line in self.differences or self.conflicts]
        lines += few([f"{key}: {why}" for key, why in self.left_over.items()])
        lines += few([f"{name}: not in the file" for name in self.missing])
        part = "image" if self.tower.startswith("image") else "text"
        raise RequestError(
            f"the weights {self.file} do not fit the {self.tower}: {self.share:.1%} of it would be "
            f"loaded, {len(self.left_over)} keys of the file found no place, and "
            f"{len(self.missing)} parameters of the tower are not in the file. Is it the right "
            "file for this tower? What may be left out of the file, or may start from random, is "
            f"named in model.{part}.drop_keys and model.{part}.new_keys.\n" + "\n".join(lines)
        )

    def summary(self) -> dict[str, Any]:
        """For the start of the run's metrics and its report."""
        return {
            "tower": self.tower,
            "file": self.file,
            "layout": self.layout,
            "trained": self.trained,
            "loaded": len(self.matched) + len(self.resampled),
            "resampled": self.resampled,
            "derived": len(self.derived),
            "dropped": len(self.dropped),
            "reasons": reasons(self.dropped | self.derived),
            "new": len(self.new),
            "share": self.share,
            "layers": [vars(layer) for layer in self.layers],
            "architecture": self.architecture.tree() if self.architecture else None,
            "note": self.note,
        }

    def tree(self) -> dict[str, Any]:
        """Everything, key by key."""
        return self.summary() | {
            "fits": self.fits,
            "matched": self.matched,
            "new": self.new,
            "derived": self.derived,
            "dropped": self.dropped,
            "left_over": self.left_over,
            "missing": self.missing,
            "differences": self.differences,
        }


def reasons(keys: dict[str, str]) -> dict[str, int]:
    """How many keys there are for each reason."""
    counts: dict[str, int] = {}
    for reason in keys.values():
        counts[reason] = counts.get(reason, 0) + 1
    return counts


def few(lines: list[str]) -> list[str]:
    hidden = len(lines) - SHOWN
    return [f"  {line}" for line in lines[:SHOWN]] + (
        [f"  and {hidden} more"] if hidden > 0 else []
    )
