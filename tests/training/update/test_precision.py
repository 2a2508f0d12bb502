"""What a recipe may say of precision, and runs in it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dtypes import FP32, one
from pennyclip.base.errors import RequestError
from pennyclip.config.file import load_recipe, read_toml, to_toml
from pennyclip.config.keys import Checkpointing, Config, LossScaling, ModulePrecision, Stage
from pennyclip.loss import LOSSES
from pennyclip.training.loop import resume, train
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.training.update.precision import check_precision, choose, lr_scale
from pennyclip.training.update.scaling import LossScaler
from pennyclip.weights.checkpoint import checkpoints
from small_runs import small_run
from update_batches import adamw, pairs, tiny_clip, weights


def request(dataset: Path, **changed: Any) -> Config:
    config = small_run(
        dataset,
        stages=(Stage(samples=8 * 6),),
        precision="pure-bf16",
        checkpoint=Checkpointing(every_steps=1, keep=9),
    )
    return replace(config, **changed)


def test_every_key_survives_toml(tmp_path: Path) -> None:
    own = (ModulePrecision(modules="visual.trunk.*", precision="fp32"),)
    config = request(tmp_path, precision_of=own)
    config = replace(config, optim=replace(config.optim, stochastic_rounding=True, lr_scale=0.5))
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    assert read_toml(tmp_path / "recipe.toml") == config


@pytest.mark.parametrize(
    ("precision", "optim", "message"),
    [
        ("bf16", {"stochastic_rounding": True}, "belongs to precision = pure-bf16"),
        ("pure-fp16", {"stochastic_rounding": True}, "the run's is pure-fp16"),
        ("auto", {"stochastic_rounding": True}, "the run's is auto"),
        ("fp32", {"lr_scale": 2.0}, "lr_scale = 2 would have no effect"),
        ("bf16", {"lr_scale": 0.0}, "finite number above 0"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    small_dataset: Path, tmp_path: Path, precision: Any, optim: dict[str, Any], message: str
) -> None:
    config = request(small_dataset, precision=precision)
    config = replace(config, optim=replace(config.optim, **optim))
    with pytest.raises(RequestError, match=message):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_lr_scale_is_for_16_bits_and_off_unless_asked() -> None:
    config = load_recipe("scratch-vit-tiny")
    asked = replace(config, precision="auto", optim=replace(config.optim, lr_scale=0.5))
    for precision, scale in {"fp32": 1, "tf32": 1, "bf16": 0.5, "pure-fp16": 0.5}.items():
        assert lr_scale(asked, precision) == scale
        assert lr_scale(config, precision) == 1
    check_precision(tiny_clip(), asked)


def test_pure_fp16_scales_and_skips_what_overflows() -> None:
    """The scaled gradient does not fit into 16 bits until the scale has come down."""
    model, batch = tiny_clip(), pairs(4)
    scaler = LossScaler(LossScaling(start=2.0**24))
    optimizer, before = adamw(model), weights(model)
    records = []
    for _ in range(16):
        records.append(one(model, batch, precision="pure-fp16", scaler=scaler, optimizer=optimizer))
        if records[-1]["skipped"]:
            assert all(torch.equal(v, before[n]) for n, v in weights(model).items())
    outcome = [bool(r["skipped"]) for r in records]
    assert outcome == sorted(outcome, reverse=True)
    assert 2 < sum(outcome) < 16
    assert "the gradient of" in records[0]["skipped"]["tensor"]
    assert choose("pure-fp16", torch.device("cpu"), 1).reason.endswith("slower than fp32")
    name = "visual.head.proj.weight"
    assert not torch.equal(model.get_parameter(name), before[name])


@pytest.mark.parametrize("precision", ["pure-bf16", "pure-fp16", "stochastic", "stochastic lamb"])
def test_a_resumed_run_equals_an_unbroken_one(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any
) -> None:
    config = request(small_dataset)
    stochastic, _, optimizer = precision.partition(" ")
    if stochastic == "stochastic":
        optim = replace(config.optim, stochastic_rounding=True, name=optimizer or "adamw")
        config = replace(config, optim=optim)
    else:
        config = replace(config, precision=precision)
    own = ModulePrecision(modules="visual.trunk.blocks.0", precision="fp32")
    config = replace(config, precision_of=(own,))
    train(config, tmp_path / "straight", quiet=True)
    sound, calls = LOSSES["infonce"].compute, []

    def broken(features: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise OSError("pulled the plug")
        return sound(features)

    with monkeypatch.context() as patch:
        patch.setitem(LOSSES, "infonce", replace(LOSSES["infonce"], compute=broken))
        with pytest.raises(OSError, match="plug"):
            train(config, tmp_path / "broken", quiet=True)
    resume(tmp_path / "broken", quiet=True)
    one_run, other = (checkpoints(tmp_path / name) for name in ("straight", "broken"))
    assert [c.step for c in one_run] == [c.step for c in other] == [1, 2, 3, 4, 5, 6]
    first, second = (load_file(c[-1].path / "model.safetensors") for c in (one_run, other))
    for name, value in first.items():
        assert value.dtype == FP32
        assert torch.equal(value, second[name])
    narrow = {n: torch.equal(v, v.bfloat16().float()) for n, v in first.items() if v.ndim > 1}
    if stochastic == "stochastic":
        assert {n for n, is_so in narrow.items() if not is_so} == {
            n for n in narrow if n.startswith("visual.trunk.blocks.0.")
        }
    else:
        assert not any(narrow.values())
    start = read_metrics(tmp_path / "straight" / "metrics.jsonl")[0]
    assert start["precision"]["precision"] == config.precision
