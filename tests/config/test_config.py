"""Configurations: strict to read, and the same again after writing."""

import dataclasses
from pathlib import Path

import pytest

from pennyclip.base.errors import RequestError
from pennyclip.config.file import load_recipe, read_toml, recipe_names, to_toml
from pennyclip.config.keys import Config, ImageTower, Model, Stage, TransformersText


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_reads_and_writes_back_equal(name: str, tmp_path: Path) -> None:
    config = load_recipe(name)
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert read_toml(tmp_path / "c.toml") == config


def test_awkward_values_survive(tmp_path: Path) -> None:
    config = Config(
        data='a "quoted" \\ path\twith tab',
        model=Model(
            image=ImageTower(name="x", mean=(0.1, 0.2, 0.3)), text=TransformersText(name="folder")
        ),
        stages=(Stage(epochs=0.5, image_layers="none"), Stage(samples=7, image_layers=3)),
    )
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert read_toml(tmp_path / "c.toml") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_sise = 3", "unknown key 'batch_sise'. Did you mean 'batch_size'?"),
        ("[optim]\nwarmup_step = 3", "Did you mean 'warmup_steps'?"),
        ("batch_size = 2.5", "batch_size: expected int, found 2.5"),
        ('precision = "fp64"', "expected one of 'fp32'"),
        ("[optim]\nbetas = [0.9]", "expected 2 values"),
        ("stages = 3", "stages: expected"),
        ("batch_size = ", "not valid TOML"),
        ("batch_size = 8", "the key 'model' is missing"),
        ('[model.text]\nkind = "rnn"', "kind must be one of clip, transformers"),
        ("batch_size = true", "expected int"),
    ],
)
def test_mistakes_are_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(RequestError) as error:
        read_toml(tmp_path / "c.toml")
    assert message in str(error.value)


def test_an_unknown_recipe_names_its_neighbour() -> None:
    with pytest.raises(RequestError, match="Did you mean 'scratch-vit-tiny'"):
        load_recipe("scratch-vit-tny")


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_recipe("scratch-vit-tiny").seed = 3  # type: ignore[misc]
