"""A run that starts from another run, and one whose cooldown is begun by hand."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pennyclip.cli import main
from pennyclip.config.file import load_recipe, read_toml, to_toml
from pennyclip.config.keys import Config, Optim, Stage
from pennyclip.training.loop import train
from pennyclip.training.run import resolved
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.weights.checkpoint import best, checkpoints

BATCH = 8


def small(data: Path, *stages: Stage, **changed: object) -> Config:
    config = load_recipe("scratch-vit-tiny")
    text = replace(config.model.text, width=64, heads=2, layers=2)
    image = replace(config.model.image, image_size=32)
    return replace(
        config,
        data=str(data),
        model=replace(config.model, image=image, text=text),
        batch_size=BATCH,
        stages=stages or (Stage(samples=6 * BATCH),),
        log_every=1,
        **changed,
    )


@pytest.fixture(scope="module")
def first(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "first"
    train(small(small_dataset), run, quiet=True)
    return run


def test_init_takes_the_weights_and_nothing_else(
    first: Path, small_dataset: Path, tmp_path: Path
) -> None:
    """With a rate of 0 the weights stay what they were; the steps count from 0."""
    config = small(small_dataset, init=str(first), optim=Optim(lr=1e-30, weight_decay=0.0))
    train(config, tmp_path / "second", quiet=True)
    there = load_file(best(checkpoints(first)).path / "model.safetensors")
    here = load_file(checkpoints(tmp_path / "second")[-1].path / "model.safetensors")
    assert there.keys() == here.keys()
    assert all(torch.equal(value, here[name]) for name, value in there.items())
    records = list(read_metrics(tmp_path / "second" / "metrics.jsonl"))
    assert records[0]["step"] == 0
    assert str(first) in records[0]["init"]


def test_init_from_weights_that_are_not_finite_is_refused(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(first, run)
    file = checkpoints(run)[-1].path / "model.safetensors"
    weights = load_file(file)
    weights["visual.trunk.blocks.3.mlp.fc1.weight"][2, 1] = math.nan
    save_file(weights, file, {"format": "pt"})
    argv = ["train", str(run / "config.toml"), "--init", str(file.parent)]
    assert main([*argv, "--out", str(tmp_path / "next")]) == 2
    told = capsys.readouterr().err
    assert "1 tensors of" in told
    assert "not finite (the first: visual.trunk.blocks.3.mlp.fc1.weight)" in told
    assert not (tmp_path / "next").exists()


def test_init_at_another_image_size_resamples(
    first: Path, small_dataset: Path, tmp_path: Path
) -> None:
    stage = Stage(samples=2 * BATCH, image_size=48)
    outcome = train(small(small_dataset, stage, init=str(first)), tmp_path / "run", quiet=True)
    weights = load_file(checkpoints(outcome.run)[-1].path / "model.safetensors")
    assert weights["visual.trunk.pos_embed"].shape[1] == 1 + 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--model.embed-dim", "128"], "model.embed_dim (there 256, asked 128)"),
        (["--model.text.layers", "3"], "model.text.layers (there 2, asked 3)"),
        (["--model.image.name", "vit_small_patch16_224"], "model.image.name"),
        (["--loss", "sigmoid"], "model.logit_bias = false, and the loss 'sigmoid' needs a bias"),
        (["--loss", "sigmoid", "--model.logit-bias", "None"], "another kind of loss"),
        (["--init", "nowhere"], "holds no checkpoint"),
    ],
)
def test_init_from_another_model_is_refused(
    changes: list[str],
    message: str,
    first: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["train", str(first / "config.toml"), "--out", str(tmp_path / "run")]
    assert main([*argv, "--init", str(first), *changes]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_cooldown_begun_by_hand_ends_the_run(
    small_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planned for 100 updates, stopped after 8, and brought to its end in 2 more."""
    run = tmp_path / "run"
    optim = Optim(schedule="wsd", cooldown_share=0.2, warmup_steps=2)
    config = small(small_dataset, Stage(samples=100 * BATCH), optim=optim)
    config = replace(config, checkpoint=replace(config.checkpoint, every_steps=1))
    _stop_after(8, config, run)
    assert main(["train", "--resume", str(run), "--cooldown", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["steps"], answer["finished"]) == (10, True)
    assert read_toml(run / "config.toml").optim.cooldown_from == 8
    rates = [r["lr"]["heads"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]
    peak = optim.lr
    assert rates[2:] == pytest.approx([peak] * 7 + [peak * (1 - 0.5**0.5)])
    assert main(["train", "--resume", str(run), "--cooldown"]) == 2
    told = capsys.readouterr().err
    assert "is finished, after 10 updates" in told
    longer = re.search(r"pennyclip (train .+) --out NEW (.+);", told)
    assert longer is not None
    again = [*longer[1].split(), "--out", str(tmp_path / "longer"), *longer[2].split()]
    assert main([*again, "--stages.0.samples", str(12 * BATCH), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 12


@pytest.mark.parametrize(
    ("stopped", "by_hand", "told"),
    [
        (7, 6, "was set to begin at update 6. Go on with: pennyclip train --resume"),
        (9, None, "has begun by itself, at update 8, and it stands at 9 of 10. Go on with"),
        (10, None, "is finished, after 10 updates"),
    ],
)
def test_a_cooldown_begins_once(
    stopped: int,
    by_hand: int | None,
    told: str,
    small_dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    optim = Optim(schedule="wsd", cooldown_share=0.2, warmup_steps=2, cooldown_from=by_hand)
    config = resolved(small(small_dataset, Stage(samples=10 * BATCH), optim=optim))
    (tmp_path / "config.toml").write_text(to_toml(config))
    folder = tmp_path / f"checkpoints/step_{stopped:06}"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"step": stopped, "score": None}))
    assert main(["train", "--resume", str(tmp_path), "--cooldown"]) == 2
    assert told in capsys.readouterr().err
    assert read_toml(tmp_path / "config.toml") == config


def test_only_a_wsd_run_has_a_cooldown(
    small_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = small(small_dataset, Stage(samples=20 * BATCH))
    config = replace(config, checkpoint=replace(config.checkpoint, every_steps=1))
    _stop_after(3, config, run)
    before = (run / "config.toml").read_bytes()
    assert main(["train", "--resume", str(run), "--cooldown"]) == 2
    assert "only 'wsd' has a cooldown" in capsys.readouterr().err
    assert (run / "config.toml").read_bytes() == before


def _stop_after(step: int, config: Config, run: Path) -> None:
    """Train until a checkpoint of `step` stands, as a run that was broken off there."""
    import pennyclip.training.run as loop

    class Enough(Exception):
        pass

    original = loop.update

    def stopping(*arguments: object, **named: object) -> object:
        found = checkpoints(run)
        if found and found[-1].step >= step:
            raise Enough
        return original(*arguments, **named)

    loop.update = stopping
    try:
        with pytest.raises(Enough):
            train(config, run, quiet=True)
    finally:
        loop.update = original
