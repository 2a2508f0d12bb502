"""`pennyclip samples`: its arguments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from pennyclip.commands.answer import Answer, Json
from pennyclip.config.keys import Config


@dataclass(frozen=True)
class Samples:
    """What training sees of some pairs under a recipe's augmentation, as a page to look at."""

    config: Annotated[Config, arg(name="")]
    out: Path
    """The page."""
    count: int = 12
    """Pairs, evenly from the subset that is trained on."""
    epochs: int = 4
    """Epochs shown of each."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.reporting.samples import write_samples

        captions = write_samples(self.config, self.out, self.count, self.epochs)
        return Answer(f"samples: {self.out}", {"page": str(self.out), "captions": captions})
