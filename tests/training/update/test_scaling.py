"""Loss scaling: the scale's course, its norm, and a run that is resumed. See test_overflows.py."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.config.file import load_recipe
from pennyclip.config.keys import Augment, Checkpointing, Config, LossScaling, Stage
from pennyclip.data.index import Dataset
from pennyclip.loss import LOSSES, Features
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import freeze
from pennyclip.training.loop import resume, train
from pennyclip.training.plan import make_plan
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.training.update.scaling import LossScaler, make_scaler
from pennyclip.training.update.update import update
from pennyclip.weights.checkpoint import checkpoints
from small_runs import small_run
from update_batches import adamw, gradients, pairs, tiny_clip, weights

FP16: dict[str, Any] = {"clip_norm": 1.0, "precision": "fp16"}


def test_the_scale_falls_at_once_and_rises_slowly() -> None:
    scaler = LossScaler(LossScaling(start=64.0, growth=4.0, backoff=0.25, interval=3, floor=2.0))
    scales = []
    for happened in "uuou uuuo oooo u".replace(" ", ""):
        scaler.updated() if happened == "u" else scaler.overflowed()
        scales.append(scaler.scale)
    assert scales == [64, 64, 16, 16, 16, 64, 64, 16, 4, 2, 2, 2, 2]
    assert scaler.overflows == 6


@given(st.text("uo", max_size=300), st.integers(0, 300))
def test_a_resumed_scaler_goes_on_as_if_it_had_not_stopped(happened: str, cut: int) -> None:
    config = LossScaling(start=2.0**10, interval=2)
    straight, broken = LossScaler(config), LossScaler(config)
    for number, event in enumerate(happened):
        if number == cut:
            state = json.loads(json.dumps(broken.state()))
            broken = LossScaler(config)
            broken.load(state)
        for scaler in (straight, broken):
            scaler.updated() if event == "u" else scaler.overflowed()
        assert vars(straight) == vars(broken)
        assert straight.scale >= 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"floor": 0.5}, "floor = 0.5: expected at least 1"),
        ({"start": 1.0, "floor": 2.0}, "start = 1: expected at least floor, 2"),
        ({"start": math.inf}, "start = inf"),
        ({"start": math.nan}, "start = nan"),
        ({"growth": 1.0}, "growth = 1: expected a factor above 1"),
        ({"backoff": 1.0}, "backoff = 1: expected a factor between 0 and 1"),
        ({"interval": 0}, "interval = 0: expected at least 1 update"),
        ({"patience": 0}, "patience = 0: expected at least 1 overflow"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"loss_scaling.{message}"):
        LossScaler(LossScaling(**values))
    config = replace(load_recipe("scratch-vit-tiny"), precision="auto")
    with pytest.raises(RequestError, match=message):  # also where auto comes to fp32
        make_scaler(replace(config, loss_scaling=LossScaling(**values)), "fp32")


def frozen() -> CLIP:
    """Only heads and temperature learn, from stored features: an update takes a millisecond."""
    model = tiny_clip()
    freeze(model, "none", "none")
    return model


def stored(number: int, factor: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        "image_features": factor * torch.randn(4, 192, generator=generator),
        "text_features": torch.randn(4, 32, generator=generator),
    }


def test_a_scale_that_is_too_large_comes_down_to_one_that_works() -> None:
    """Real overflows: the scaled gradient does not fit into float16."""
    model, batch = frozen(), pairs(4, **stored(0))
    optimizer, scaler = adamw(model, 1e-6), LossScaler(LossScaling(start=2.0**24))
    records = [
        update(model, LOSSES["infonce"], optimizer, batch, scaler=scaler, **FP16) for _ in range(16)
    ]
    outcome = [bool(record["skipped"]) for record in records]
    assert outcome == sorted(outcome, reverse=True)
    assert 2 < sum(outcome) < 14
    assert records[0]["skipped"]["tensor"] == "the gradient of visual.head.proj.weight"


@pytest.mark.parametrize("clip_norm", [1e-2, 1e3])
def test_the_norm_that_is_clipped_does_not_depend_on_the_scale(clip_norm: float) -> None:
    """In float32 a power of two changes no bit."""
    found = []
    for start in (1.0, 2.0**10, 2.0**16):
        model = frozen()
        record = update(
            model,
            LOSSES["infonce"],
            adamw(model),
            pairs(4, **stored(0)),
            scaler=LossScaler(LossScaling(start=start)),
            **FP16 | {"precision": "fp32", "clip_norm": clip_norm},
        )
        found.append((float(record["grad_norm"]), gradients(model), weights(model)))
    assert clip_norm == 1e3 or found[0][0] > clip_norm
    for norm, clipped, after in found[1:]:
        assert norm == found[0][0]
        assert all(torch.equal(value, found[0][1][name]) for name, value in clipped.items())
        assert all(torch.equal(value, found[0][2][name]) for name, value in after.items())


# Through the loop.

BATCH, STEPS = 8, 12


def request(dataset: Path) -> Config:
    return small_run(
        dataset,
        stages=(Stage(samples=BATCH * STEPS, image_layers="none"),),
        augment=Augment(),
        batch_size=BATCH,
        precision="fp16",
        loss_scaling=LossScaling(start=1024.0, interval=2, patience=4),
        checkpoint=Checkpointing(every_steps=1),
    )


def overflowing(monkeypatch: pytest.MonkeyPatch, on: Any) -> list[int]:
    """Make the loss infinite in the batches for which `on(rows)`; the list counts them all."""
    calls: list[int] = []
    sound = LOSSES["infonce"].compute

    def compute(features: Features) -> tuple[Tensor, dict[str, float | Tensor]]:
        calls.append(1)
        value, metrics = sound(features)
        return value + (math.inf if on(features.groups) else 0.0), metrics

    monkeypatch.setitem(LOSSES, "infonce", replace(LOSSES["infonce"], compute=compute))
    return calls


def updates(run: Path) -> list[dict[str, Any]]:
    times = {"time", "samples_per_second", "input_wait", "seconds"}
    records = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] in ("train", "event")]
    return [{key: r[key] for key in r if key not in times} for r in records]


def test_a_resumed_run_with_overflows_equals_an_unbroken_one(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = request(small_dataset)

    def bad(rows: Tensor) -> bool:
        return int(rows.sum()) % 3 == 0

    overflowing(monkeypatch, bad)
    train(config, tmp_path / "straight", quiet=True)

    def broken(rows: Tensor) -> bool:
        if len(calls) == 8:
            raise OSError("pulled the plug")
        return bad(rows)

    calls = overflowing(monkeypatch, broken)
    with pytest.raises(OSError, match="plug"):
        train(config, tmp_path / "broken", quiet=True)
    resume(tmp_path / "broken", quiet=True)

    records = updates(tmp_path / "straight")
    assert updates(tmp_path / "broken") == records
    ends = [checkpoints(tmp_path / name)[-1].path for name in ("straight", "broken")]
    one, other = (load_file(path / "model.safetensors") for path in ends)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    trainers = [torch.load(path / "trainer.pt", weights_only=True) for path in ends]
    assert trainers[0]["scaler"] == trainers[1]["scaler"]
    skips = [r for r in records if r["kind"] == "event"]
    assert 2 <= len(skips) <= STEPS - 4
    assert {r["name"] for r in skips} == {"update skipped"}
    assert all(r["message"].startswith("the loss is not finite") for r in skips)
    assert [t["skipped"] for t in trainers] == [len(skips)] * 2
    made = {float(s["step"]) for s in trainers[0]["optimizer"].values()}
    assert made == {float(STEPS - len(skips))}

    plan = make_plan(config, len(Dataset(small_dataset).subset("train")))
    lines = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in lines] == list(range(1, STEPS + 1))
    bad_steps = {r["step"] for r in skips}
    for r in lines:
        before = sum(step < r["step"] for step in bad_steps)
        assert r["skipped"] == r["overflows"] == before + (r["step"] in bad_steps)
        assert r["lr"]["heads"] == config.optim.lr * plan.lr_factor(r["step"] - 1 - before)
