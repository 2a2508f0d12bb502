"""Every kind of optimizer trains, tells what it has to tell, and resumes exactly."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pennyclip.checkpoint import checkpoints
from pennyclip.config import ClipText, Stage
from pennyclip.config_file import load_recipe
from pennyclip.telemetry.metrics import read_metrics
from pennyclip.train import resume, train


@pytest.mark.parametrize("name", ["stable-adamw", "lion", "eva-lamb"])
def test_a_resumed_run_equals_an_unbroken_one(
    name: str, small_dataset: Path, tmp_path: Path
) -> None:
    recipe = load_recipe("scratch-vit-tiny")
    image = replace(recipe.model.image, image_size=32)
    config = replace(
        recipe,
        data=str(small_dataset),
        model=replace(recipe.model, image=image, text=ClipText(width=32, heads=2, layers=1)),
        stages=(Stage(samples=32),),
        batch_size=8,
        workers=0,
        log_every=1,
        optim=replace(recipe.optim, name=name, lr=1e-3),
        checkpoint=replace(recipe.checkpoint, every_steps=2, keep=9),
        evaluate=replace(recipe.evaluate, every_epochs=9.0),
    )
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(config, straight, quiet=True)
    shutil.copytree(straight, broken)
    for checkpoint in checkpoints(broken):
        if checkpoint.step > 2:
            shutil.rmtree(checkpoint.path)
    resume(broken, quiet=True)
    ends = [load_file(checkpoints(r)[-1].path / "model.safetensors") for r in (straight, broken)]
    begin = load_file(checkpoints(straight)[0].path / "model.safetensors")
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())
    assert not torch.equal(begin["logit_scale"], ends[0]["logit_scale"])
    lines = [r for r in read_metrics(broken / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in lines] == [1, 2, 3, 4]
    for line in lines:
        if name == "eva-lamb":  # whose ratios are limited to 0.01 .. 10
            assert line["trust_ratio"].keys() == line["lr"].keys()
            assert all(0.0099 < ratio < 10.1 for ratio in line["trust_ratio"].values())
        else:
            assert "trust_ratio" not in line
