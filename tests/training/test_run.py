"""A request is resolved and made ready once, whoever asks for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pennyclip.base.errors import RequestError
from pennyclip.commands.bench.workbench import open_workbench
from pennyclip.config.file import read_toml
from pennyclip.config.keys import Config, ModulePrecision, Optim, Stage
from pennyclip.training.loop import train
from pennyclip.training.run import make_ready, open_request
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.weights.checkpoint import checkpoints, load_model
from small_runs import small_run


def request(dataset: Path, **changed: Any) -> Config:
    stages = (Stage(samples=16, mask_ratio=0.5),)
    config = small_run(dataset, **{"stages": stages, "optim": Optim(warmup_steps=0)} | changed)
    return replace(config, model=replace(config.model, head_dropout=0.2))


def test_a_measured_update_is_a_runs_own(small_dataset: Path, tmp_path: Path) -> None:
    """To the bit, with crops, masks, dropout, a precision and a rate factor of its own."""
    config = request(
        small_dataset,
        precision="bf16",
        precision_of=(ModulePrecision(modules="text", precision="fp32"),),
        optim=Optim(lr=1e-3, lr_scale=0.5, warmup_steps=0),
    )
    train(config, tmp_path / "run", quiet=True)
    lines = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if r["kind"] == "train"]
    bench = open_workbench(config, 0)
    for step, line in enumerate(lines):
        bench.plan.set_rates(bench.setup.optimizer, step)
        batch = bench.setup.loader.batch(step)
        record = bench.update(bench.setup, batch, step, bench.scaler)
        for key in ("loss", "grad_norm", "logit_scale", "lr"):
            assert record[key] == line[key], (step, key)
    assert max(record["lr"].values()) < 0.5 * 1e-3  # the cosine has begun
    plain = open_workbench(replace(config, precision_of=()), 0)
    first = plain.setup.loader.batch(0)
    other = plain.update(plain.setup, first, 0, plain.scaler)
    assert other["loss"] != lines[0]["loss"]


@pytest.mark.parametrize(("loss", "has_bias"), [("infonce", False), ("sigmoid", True)])
def test_the_loss_decides_about_the_bias(
    loss: str, has_bias: bool, small_dataset: Path, tmp_path: Path
) -> None:
    config = request(small_dataset, loss=loss)
    resolved, *_ = open_request(config)
    assert resolved.model.logit_bias is has_bias
    same = replace(config, model=replace(config.model, logit_bias=has_bias))
    assert open_request(same)[0] == open_request(resolved)[0] == resolved
    wrong = replace(config, model=replace(config.model, logit_bias=not has_bias))
    with pytest.raises(RequestError, match=f"the loss '{loss}' needs {'a' if has_bias else 'no'}"):
        train(wrong, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_paths_become_absolute_and_a_checkpoint_is_gone_on_from(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small_dataset.parent)
    config = request(Path(small_dataset.name))
    train(config, tmp_path / "run", quiet=True)
    written = read_toml(tmp_path / "run/config.toml")
    assert written.data == str(small_dataset)
    (last,) = checkpoints(tmp_path / "run")
    ready = make_ready(*open_request(config), last)
    assert ready.start.step == last.step == 2
    expected = load_model(last).state_dict()
    assert all((value == expected[name]).all() for name, value in ready.model.state_dict().items())


def test_a_precision_that_the_device_has_not_leaves_no_run(
    small_dataset: Path, tmp_path: Path
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU has tf32")
    with pytest.raises(RequestError, match="precision = tf32"):
        train(request(small_dataset, precision="tf32"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
