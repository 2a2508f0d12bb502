"""Faults at moments when a watcher knows little, and those that come back again and again."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pennyclip.training.run
from faulty_runs import (
    BATCH,
    SOUND,
    Do,
    do_before_each,
    events,
    mean_loss,
    named,
    names,
    nan_in_a_layer,
    request,
    trained,
)
from pennyclip.base.errors import RunError
from pennyclip.config.keys import Checkpointing, Config, Stability, Stage
from pennyclip.data.loader import Batch
from pennyclip.training.loop import resume, train
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.training.watch import watch as stability
from pennyclip.weights.checkpoint import checkpoints


@pytest.fixture
def before_each(monkeypatch: pytest.MonkeyPatch) -> Callable[[Do], None]:
    return partial(do_before_each, monkeypatch)


def unclipped(config: Config) -> Config:
    return replace(config, optim=replace(config.optim, clip_norm=math.inf))


def wild(at: set[int]) -> Do:
    """Updates with 1,000 times the rate."""

    def do(number: int, _: Any, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 1000 if number in at else 1

    return do


def test_a_spike_names_the_rows_that_made_it(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From batch 81 on, the captions of ten rows are lost."""
    bad: set[int] = set()
    seen = [0]

    def damaged(model: Any, loss: Any, optimizer: Any, batch: Batch, **more: Any) -> Any:
        seen[0] += 1
        bad.update(row for row in batch.rows[:2].tolist() if seen[0] > 80 and len(bad) < 10)
        lost = torch.tensor([row in bad for row in batch.rows.tolist()])
        assert batch.tokens is not None
        tokens = batch.tokens.masked_fill(lost[:, None], 7)
        return SOUND(model, loss, optimizer, replace(batch, tokens=tokens), **more)

    monkeypatch.setattr(pennyclip.training.run, "update", damaged)
    train(request(small_dataset, 90), tmp_path / "run", quiet=True)
    spike = named(tmp_path / "run", "loss spike")
    assert spike["since"] == 81
    assert set(spike["rows"][:4]) <= bad
    assert spike["row_losses"][0] > 1 > spike["row_losses"][-1]
    assert spike["batches"][0] >= 81


def test_an_event_names_the_layer_that_jumped_before(
    small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    """One tensor's gradient grows a thousandfold in batches 47 to 49; in 51 the loss is NaN."""

    def do(number: int, model: Any, _: Any) -> None:
        weight = model.text.transformer.resblocks[0].mlp.c_fc.weight
        if number == 47:
            weight.growing = weight.register_hook(lambda gradient: 1000 * gradient)
        if number == 50:
            weight.growing.remove()
        nan_in_a_layer(lambda n: n == 51)(number, model, _)

    before_each(do)
    train(request(small_dataset, 52), tmp_path / "run", quiet=True)
    (event,) = events(tmp_path / "run")
    (layer, jump), *_ = event["gradient_jumps"].items()
    assert (layer, jump["batch"]) == ("text.transformer", 47)  # it has one block
    assert jump["times"] > 100
    record = trained(tmp_path / "run")[48]
    assert record["grad_norms"][layer] == pytest.approx(record["grad_norm"], rel=1e-2)
    assert set(record["grad_means"]) == set(record["grad_norms"])
    assert trained(tmp_path / "run")[50]["grad_means"] == {}


def test_four_of_five_batches_without_an_update_stop_the_run(
    small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    before_each(nan_in_a_layer(lambda number: number > 30 and number % 5 > 0))
    message = r"from 20 of the last 50 batches.*c_proj in batch \d+\. The run was rolled back 1 "
    config = replace(request(small_dataset, 200), stability=Stability(rollbacks=1))
    with pytest.raises(RunError, match=message):
        train(config, tmp_path / "run", quiet=True)
    back = named(tmp_path / "run", "rolled back")
    assert (back["since"], back["step"], back["to"]) == (31, 54, 20)
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1] < 85


@pytest.mark.parametrize("refill", [30, 2000])
def test_rollbacks_are_there_again_after_a_healthy_stretch(
    refill: int,
    small_dataset: Path,
    tmp_path: Path,
    before_each: Callable[[Do], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stability, "REFILL", refill)
    before_each(wild({40, 100}))
    config = unclipped(replace(request(small_dataset, 125), stability=Stability(rollbacks=1)))
    if refill > 60:
        with pytest.raises(RunError, match="rolled back 1 times before, as often as"):
            train(config, tmp_path / "run", quiet=True)
        return
    train(config, tmp_path / "run", quiet=True)
    backs = [e for e in events(tmp_path / "run") if e["name"] == "rolled back"]
    assert [back["rollback"] for back in backs] == [1, 1]
    assert "rate reduced" not in names(tmp_path / "run")


def test_a_fault_in_the_first_batches_of_a_stage(
    small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    """The stage knows nothing yet, and its losses must not become what is normal."""
    before_each(wild({61}))
    two = (
        Stage(samples=60 * BATCH, image_layers="none"),
        Stage(samples=40 * BATCH, image_layers="none"),
    )
    config = unclipped(replace(request(small_dataset, 100), stages=two))
    train(config, tmp_path / "run", quiet=True)
    assert names(tmp_path / "run") == ["loss spike", "rolled back"]
    assert named(tmp_path / "run", "rolled back")["since"] == 62
    assert mean_loss(tmp_path / "run") < 0.3


@pytest.mark.parametrize(
    "options", [{}, {"ema_decay": 0.9}, {"micro_batch": 5}], ids=["plain", "ema", "cached"]
)
def test_faults_in_the_first_and_last_batches_and_after_a_resume(
    options: dict[str, Any],
    small_dataset: Path,
    tmp_path: Path,
    before_each: Callable[[Do], None],
) -> None:
    """Killed in batch 50 with the last checkpoint at 40; the first one after that is NaN."""
    run = tmp_path / "run"
    config = unclipped(request(small_dataset, 90, **options))

    def killed(number: int, model: Any, _: Any) -> None:
        if number == 50:
            raise OSError("killed")
        nan_in_a_layer(lambda n: n in (1, 2, 45))(number, model, _)

    before_each(killed)
    with pytest.raises(OSError, match="killed"):
        train(config, run, quiet=True)

    def after(number: int, model: Any, optimizer: Any) -> None:
        nan_in_a_layer(lambda n: n + 40 == 41)(number, model, optimizer)
        if number + 40 == 90:
            model.text.ln_final.weight.register_hook(lambda gradient: gradient * math.nan)
        wild({80 - 40})(number, model, optimizer)

    before_each(after)
    resume(run, quiet=True)
    told = [(e["step"], e["name"], e.get("abandoned", False)) for e in events(run)]
    assert told[:4] == [
        (1, "update skipped", False),
        (2, "update skipped", False),
        (45, "update skipped", True),
        (41, "update skipped", False),
    ]
    assert [name for _, name, _ in told[4:]] == ["loss spike", "rolled back", "update skipped"]
    assert told[-1][0] == 90
    back = named(run, "rolled back")
    assert (back["since"], back["to"]) == (81, 60)
    end = checkpoints(run)[-1]
    assert end.step == 90
    for file in end.path.glob("*.safetensors"):
        assert all(v.isfinite().all() for v in load_file(file).values() if v.is_floating_point())
    if "ema_decay" in options:
        assert len(list(end.path.glob("*.safetensors"))) == 2
    lines = trained(run)
    assert float(lines[-2]["loss"]) < 0.5
    assert lines[-1]["skipped"] == 2 + 1 + back["undone"] + 1


def test_a_run_that_goes_wrong_at_its_very_end_ends_with_the_good_weights(
    small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    before_each(wild({74}))
    config = unclipped(request(small_dataset, 80, checkpoint=Checkpointing(every_steps=20, keep=9)))
    outcome = train(config, tmp_path / "run", quiet=True)
    assert outcome.finished
    assert [n for n in names(tmp_path / "run") if n != "update RMS"] == [
        "loss spike",
        "rolled back",
    ]
    assert named(tmp_path / "run", "rolled back")["step"] == 80
    found = {c.step: c.path for c in checkpoints(tmp_path / "run")}
    one, other = (load_file(found[step] / "model.safetensors") for step in (60, 80))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_nothing_but_faults_from_the_first_batch_on_stops_at_once(
    small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    before_each(nan_in_a_layer(lambda number: True))
    with pytest.raises(RunError, match=r"5 batches in a row.*in batch 1\. No update was made"):
        train(request(small_dataset, 20), tmp_path / "run", quiet=True)
    assert names(tmp_path / "run") == ["update skipped"] * 5 + ["stopped"]
