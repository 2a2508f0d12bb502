"""Every kind of optimizer trains, tells what it has to tell, and resumes exactly."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pennyclip.base.errors import RequestError
from pennyclip.config.check import check_config
from pennyclip.config.keys import Checkpointing, Optim
from pennyclip.training.loop import resume, train
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.weights.checkpoint import checkpoints
from small_runs import small_run


@pytest.mark.parametrize("name", ["stable-adamw", "lion", "eva-lamb"])
def test_a_resumed_run_equals_an_unbroken_one(
    name: str, small_dataset: Path, tmp_path: Path
) -> None:
    config = small_run(small_dataset, checkpoint=Checkpointing(every_steps=2, keep=9))
    config = replace(config, optim=replace(config.optim, name=name, lr=1e-3))
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


@pytest.mark.parametrize("clip_norm", [5.0, math.inf])
def test_nvlamb_clips_by_itself_so_no_larger_norm_is_taken(clip_norm: float) -> None:
    config = small_run(Path(), optim=Optim(name="nvlamb"))
    check_config(config)
    with pytest.raises(RequestError, match=f"clip_norm = {clip_norm:g} would have no effect"):
        check_config(replace(config, optim=replace(config.optim, clip_norm=clip_norm)))
