"""A run that is over in seconds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pennyclip.config.file import load_recipe
from pennyclip.config.keys import ClipText, Config, Stage


def small_run(dataset: Path, *, image_size: int = 32, **changed: Any) -> Config:
    """`scratch-vit-tiny` on small pictures beside one text layer: 4 updates of 8 pairs.

    Every update is logged; only the end is evaluated.
    """
    recipe = load_recipe("scratch-vit-tiny")
    image = replace(recipe.model.image, image_size=image_size)
    config = replace(
        recipe,
        data=str(dataset),
        model=replace(recipe.model, image=image, text=ClipText(width=32, heads=2, layers=1)),
        stages=(Stage(samples=32),),
        batch_size=8,
        log_every=1,
        workers=0,
        evaluate=replace(recipe.evaluate, every_epochs=9.0),
    )
    return replace(config, **changed)
