"""A run that shows some sources more often: epochs, refusals, and the rows that come."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Config, ImageTower, Model, Stage
from pennyclip.data.prepare import prepare
from pennyclip.training.stage import open_rows

CONFIG = Config(model=Model(image=ImageTower(name="x")), stages=(Stage(epochs=2.0),), batch_size=4)


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 and 30 distinct pictures."""
    folder = tmp_path_factory.mktemp("two")
    for name, count, seed in (("a", 12, 0), ("b", 30, 100)):
        (folder / name).mkdir()
        rows = []
        for i in range(count):
            noise = np.random.default_rng(seed + i).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(noise).save(folder / name / f"{i}.png")
            rows.append({"image": f"{i}.png", "caption": f"{name} {i}"})
        lines = "\n".join(map(json.dumps, rows))
        (folder / name / "captions.jsonl").write_text(lines)
    options = {"val_share": 0, "dev_share": 0, "workers": 1, "quiet": True}
    prepare([folder / "a", folder / "b"], folder / "out", **options)  # type: ignore[arg-type]
    return folder / "out"


def test_an_epoch_is_as_long_as_the_weights_make_it(two_sources: Path) -> None:
    config = replace(CONFIG, data=str(two_sources))
    assert open_rows(config).epoch == 42
    rows = open_rows(replace(config, weights=(2.0, 0.5)))
    assert rows.epoch == 24 + 15
    assert rows.mixture is not None
    indices, rounds = rows.mixture.at(0, 2 * 39)
    seen = np.bincount(rows.train[indices], minlength=42)
    assert seen.tolist() == [4] * 12 + [1] * 30
    assert set(rounds[indices < 12].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weights": (1.0,)},
            r"weights has 1 numbers, expected one for each of the 2 sources.*/a/",
        ),
        ({"weights": (1.0, -1.0)}, "expected numbers from 0 to 1000"),
        ({"weights": (1.0, float("nan"))}, "expected numbers from 0 to 1000"),
        ({"weights": (0.0, 0.0)}, "leave nothing to train on"),
        ({"weights": (1.0, 2.0), "shuffle_window": 10}, "can't be combined"),
    ],
)
def test_weights_that_make_no_sense_are_refused(
    two_sources: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=f"(?s){message}"):
        open_rows(replace(CONFIG, data=str(two_sources), **changes))  # type: ignore[arg-type]
