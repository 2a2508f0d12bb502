"""The command `pennyclip filter`: its arguments."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from pennyclip.commands.answer import Answer, Json


@dataclass(frozen=True)
class Filter:
    """Choose rows by text, size, repetition or CLIP score -> a named subset to train on."""

    data: Annotated[Positional[Path], arg(metavar="DATASET")]
    """The prepared dataset."""
    name: str
    """Of the subset; `train --subset NAME` takes it."""
    union: tuple[str, ...] = ("train",)
    """Start with the rows of any of these subsets."""
    intersect: tuple[str, ...] = ()
    """Of them, those that are in each of these subsets too."""
    min_words: int | None = None
    """Fewest words of a row's longest caption."""
    min_characters: int | None = None
    """Fewest characters of it."""
    min_side: int | None = None
    """Fewest pixels of the picture's shorter side, as it came."""
    max_aspect: float | None = None
    """Most that the longer side may be of the shorter."""
    score: str | None = None
    """A model: a run, a folder of open_clip's or transformers', or hub:ORG/NAME."""
    checkpoint: str = "best"
    """Of a run: best, last or a step; ema, ema:last or ema:STEP for averaged weights."""
    threshold: float | None = None
    """Lowest score that stays: the mean cosine of a picture with its captions."""
    keep: float | None = None
    """Share of the rows that stays, the best scored."""
    max_similarity: float | None = None
    """Largest cosine between two pictures that both stay, by the same model. Every pair of rows
    is compared: ten times the rows take a hundred times as long."""
    max_repeats: int | None = None
    """Most rows of one group (one picture or caption) that stay."""
    json: Json = False

    def run(self) -> Answer:
        from pennyclip.commands.filter.rules import Rules
        from pennyclip.commands.filter.subset import filter_dataset
        from pennyclip.training.telemetry.console import Console

        own = [field.name for field in dataclasses.fields(Rules)]
        given = {k: v for k, v in vars(self).items() if k not in (*own, "data", "name", "json")}
        rules = Rules(**{key: getattr(self, key) for key in own})
        console = Console(total_steps=1)
        try:
            done = filter_dataset(
                self.data, self.name, rules=rules, **given, progress=console.progress
            )
        finally:
            console.close()
        return Answer(str(done), dataclasses.asdict(done))
