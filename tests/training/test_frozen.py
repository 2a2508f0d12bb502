"""What a stage stores of its frozen layers, when it does not, and that training stays the same."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pennyclip.config.keys import (
    Augment,
    ClipText,
    Config,
    Evaluation,
    ImageTower,
    Model,
    Optim,
    Stage,
)
from pennyclip.data import stored
from pennyclip.evaluation.features import embed_rows, silent
from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import evaluating
from pennyclip.training.loop import train
from pennyclip.training.plan import make_plan
from pennyclip.training.stage import Rows, Setup, enter_stage, open_rows, table
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.training.update.update import update
from pennyclip.weights.build import build

STAGE = Stage(epochs=4.0, image_layers=3, text_layers=1)
MODEL = Model(
    image=ImageTower(name="test_vit", image_size=64),
    text=ClipText(width=32, layers=3, heads=2, context_length=24),
    embed_dim=16,
    head_dropout=0.1,
)
BATCH = 16


@pytest.fixture
def config(small_dataset: Path, tmp_path: Path) -> Config:
    """Of a dataset without any stores."""
    data = tmp_path / "dataset"
    data.mkdir()
    for path in small_dataset.iterdir():
        if path.name != "embeddings":
            (data / path.name).symlink_to(path)
    return Config(
        data=str(data),
        model=MODEL,
        stages=(STAGE,),
        batch_size=BATCH,
        workers=0,
        log_every=1,
        optim=Optim(lr=1e-3),
        evaluate=Evaluation(every_epochs=2.0),
    )


def entered(config: Config, model: CLIP | None = None) -> tuple[CLIP, Setup, Rows, str]:
    """A model in the only stage of a run, and what people are told."""
    model = build(config.model, config.seed, 14.0, 0.0)[0] if model is None else model
    rows = open_rows(config)
    setup = enter_stage(model, config, 0, rows, {}, silent)
    return model, setup, rows, table(setup, make_plan(config, len(rows.train)), 0)


def changed(config: Config, **stage: object) -> Config:
    return replace(config, stages=(replace(config.stages[0], **stage),))


def losses(config: Config, run: Path) -> np.ndarray:
    train(config, run, quiet=True)
    return np.array([r["loss"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r])


def stores(config: Config) -> list[str]:
    return sorted(path.name for path in (Path(config.data) / "embeddings").glob("*"))


def test_training_from_stored_states_is_the_same_training(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to float16: the losses, and what the development split is given."""
    found = losses(config, tmp_path / "stored")
    assert len(stores(config)) == 2
    assert np.array_equal(losses(config, tmp_path / "found again"), found)
    shutil.rmtree(Path(config.data) / "embeddings")
    monkeypatch.setattr(stored, "FREE_SHARE", 0.0)
    expected = losses(config, tmp_path / "computed")
    assert not stores(config)
    assert len(expected) > 20
    assert expected[-1] < 0.9 * expected[0]  # something was learned
    assert not np.array_equal(found, expected)  # and it was not the same computation
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_batches_hold_states_in_place_of_inputs(config: Config) -> None:
    model, setup, _, told = entered(config)
    batch = setup.loader.batch(0)
    assert batch.images is None
    assert batch.tokens is None
    assert batch.image_states is not None
    assert batch.text_states is not None
    assert batch.image_states.layers == 4
    assert batch.text_states.layers == 3
    assert batch.image_states.values.dtype == torch.float16
    assert "first 4 of 7 layers of the image trunk are frozen: their output is stored" in told
    assert "first 3 of 4 layers of the text trunk are frozen: their output is stored" in told

    # The same states as the towers make of the same inputs.
    plain = replace(setup.loader, image_store=None, text_store=None).batch(0)
    assert torch.equal(plain.rows, batch.rows)
    assert torch.equal(plain.lengths, batch.lengths)
    with evaluating(model), torch.no_grad():
        image = model.visual.prefix(plain.images, 4)
        text = model.text.prefix(plain.tokens, plain.lengths, 3)
    torch.testing.assert_close(batch.image_states.values.float(), image, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(batch.text_states.values.float(), text, rtol=1e-3, atol=1e-3)


def test_updates_from_states_in_micro_batches(config: Config) -> None:
    """Gradient caching slices states as it slices inputs."""
    norms = []
    config = replace(config, model=replace(MODEL, head_dropout=0.0))
    for micro_batch in (None, 5):
        model, setup, _, _ = entered(config)
        for group in setup.optimizer.param_groups:
            group["lr"] = 0.0
        record = update(
            model,
            LOSSES["infonce"],
            setup.optimizer,
            setup.loader.batch(0),
            clip_norm=1.0,
            precision="fp32",
            micro_batch=micro_batch,
        )
        norms.append(float(record["grad_norm"]))
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_evaluation_goes_on_from_states(config: Config) -> None:
    model, setup, rows, _ = entered(config)
    with evaluating(model):
        given = model, rows.dataset, rows.tokens, rows.evaluation, 8
        expected = embed_rows(*given)
        model.visual.features = model.text.features = None  # type: ignore[assignment]
        found = embed_rows(*given, setup.stores)
    for one, other in ((found.image, expected.image), (found.text, expected.text)):
        assert (one * other).sum(-1).min() > 1 - 1e-5
        assert not torch.equal(one, other)


def test_evaluation_never_takes_states_of_other_inputs(config: Config) -> None:
    """Captions that a stage cuts are whole in evaluation; images have the tower's size there."""
    model, setup, rows, _ = entered(changed(config, text_length=8))
    assert setup.stores.text is not None
    assert setup.loader.batch(0).text_states.values.shape[1] == 8
    model.visual.image_size = 96
    with evaluating(model):
        given = model, rows.dataset, rows.tokens, rows.evaluation, 8
        found, expected = embed_rows(*given, setup.stores), embed_rows(*given)
    assert torch.equal(found.text, expected.text)
    assert torch.equal(found.image, expected.image)


def test_the_same_frozen_layers_are_found_again_and_others_are_not(config: Config) -> None:
    model, _, _, _ = entered(config)
    first = stores(config)
    assert len(first) == 2

    def more(config: Config = config) -> int:
        entered(config, model)
        return len(stores(config)) - len(first)

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
        assert more() == 0
        assert more(changed(config, text_length=8)) == 1
        model.visual.trunk.blocks[2].mlp.fc1.bias[0] += 1e-3
        assert more() == 2
        model.text.positional_embedding[3, 0] += 1e-3
        assert more() == 3


@pytest.mark.parametrize(
    ("change", "stage", "image", "text"),
    [
        ({"augment": Augment(crop_scale=(0.5, 1.0))}, {}, "images differ each time", ""),
        ({"augment": Augment(color_jitter=0.1)}, {}, "images differ each time", ""),
        ({"augment": Augment(word_dropout=0.1)}, {}, "", "captions differ each time"),
        ({}, {"mask_ratio": 0.5}, "patches are dropped", ""),
        ({}, {"mask_ratio": (0.0, 0.5)}, "patches are dropped", ""),
        (
            {},
            {"epochs": 1.0},
            "sees 98 pairs, and all 146 would be stored",
            "sees 98 pairs, and all",
        ),
        ({}, {"image_layers": 6, "text_layers": "all"}, None, None),  # nothing, or hardly any
        ({}, {"image_layers": ("trunk.patch_embed.*",), "text_layers": 1}, None, ""),
        (
            {"model": replace(MODEL, image=ImageTower(name="convnext_atto", image_size=64))},
            {},
            "a trunk of this kind cannot be entered",
            "",
        ),
    ],
)
def test_where_storing_would_be_wrong_it_is_off_and_says_why(
    config: Config, change: dict, stage: dict, image: str | None, text: str | None
) -> None:
    _, setup, _, told = entered(changed(replace(config, **change), **stage))
    for name, why, store in (
        ("image", image, setup.stores.image),
        ("text", text, setup.stores.text),
    ):
        lines = [line for line in told.splitlines() if f"of the {name} trunk are frozen" in line]
        if why is None:
            assert not lines
        elif why:
            assert "computed at each update, not stored" in lines[0]
            assert why in lines[0]
        assert (store is not None) == (why == "")
    batch = setup.loader.batch(0)
    assert (batch.images is None) == (setup.stores.image is not None)
    assert (batch.tokens is None) == (setup.stores.text is not None)


def test_where_the_disk_has_no_room_the_run_goes_on(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole trunks too: they run at each update."""
    monkeypatch.setattr(stored, "FREE_SHARE", 0.0)
    _, setup, _, told = entered(changed(config, image_layers="none"))
    assert setup.stores.image is None
    assert setup.loader.batch(0).images is not None
    assert "the image trunk is frozen: its features are computed at each update" in told
    assert "more than 0% of the" in told
    assert not stores(config)


def test_whole_trunks_are_stored_for_any_length_and_crop(config: Config) -> None:
    config = replace(config, augment=Augment(crop_scale=(0.5, 1.0), word_dropout=0.1))
    frozen = Stage(epochs=0.5, image_layers="none", text_layers="none")
    _, setup, _, told = entered(replace(config, stages=(frozen, STAGE)))
    batch = setup.loader.batch(0)
    assert batch.image_features.shape == (BATCH, 64)
    assert batch.image_features.dtype == torch.float32
    assert batch.text_features.shape == (BATCH, 32)
    assert "the image trunk is frozen: its features are stored, from uncropped images" in told
    assert "the text trunk is frozen: its features are stored, from unchanged captions" in told
