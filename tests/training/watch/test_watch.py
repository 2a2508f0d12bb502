"""Faults of many kinds, each through `pennyclip.training.loop`: what is noticed, said and done."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from faulty_runs import (
    BATCH,
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
from pennyclip.base.errors import RequestError, RunError
from pennyclip.config.file import load_recipe
from pennyclip.config.keys import (
    Augment,
    ClipText,
    Config,
    LossScaling,
    PartRates,
    Stability,
    Stage,
)
from pennyclip.data.index import Dataset
from pennyclip.data.order import I64
from pennyclip.data.tokens import TokenStore
from pennyclip.model.clip import CLIP
from pennyclip.model.text_clip import ClipTextTower
from pennyclip.training.loop import resume, train
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.training.watch import watch as stability
from pennyclip.weights.checkpoint import checkpoints, load_trainer


@pytest.fixture
def before_each(monkeypatch: pytest.MonkeyPatch) -> Callable[[Do], None]:
    return partial(do_before_each, monkeypatch)


@pytest.fixture(scope="module")
def healthy(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "healthy"
    train(request(small_dataset, 100), run, quiet=True)
    return run


def test_a_healthy_run_has_no_event(healthy: Path) -> None:
    assert names(healthy) == []
    assert mean_loss(healthy) < 0.1 < 3 < float(trained(healthy)[0]["loss"])
    assert trained(healthy)[0]["candidates"] == BATCH


def test_nan_in_a_layer_costs_one_batch(
    healthy: Path, small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    before_each(nan_in_a_layer(lambda number: number == 50))
    train(request(small_dataset, 100), tmp_path / "run", quiet=True)
    (event,) = events(tmp_path / "run")
    assert (event["step"], event["name"]) == (50, "update skipped")
    assert event["tensor"] == "the output of text.transformer.resblocks.0.mlp.c_proj"
    assert len(event["rows"]) == 8
    assert [r["skipped"] for r in trained(tmp_path / "run")[48:51]] == [0, 1, 1]
    assert trained(tmp_path / "run")[50]["lr"]["text"] == trained(healthy)[49]["lr"]["text"]
    assert mean_loss(tmp_path / "run") < 0.1


def test_nan_that_stays_stops_the_run_with_its_first_cause(
    small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    before_each(nan_in_a_layer(lambda number: number >= 30))
    with pytest.raises(RunError, match=r"c_proj in batch 30\. Checkpoints are untouched.* 30;"):
        train(request(small_dataset, 60), tmp_path / "run", quiet=True)
    skips = ["update skipped"] * Stability.patience
    assert names(tmp_path / "run") == [*skips, "rolled back", *skips, "stopped"]
    back = named(tmp_path / "run", "rolled back")
    assert (back["step"], back["since"], back["to"], back["undone"]) == (34, 30, 20, 9)
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["kind"], last["reason"], last["step"]) == ("end", "error", 39)
    assert checkpoints(tmp_path / "run")[-1].step == 34


def bit_flip(number: int, model: CLIP, _: Any) -> None:
    """The largest bit of one weight's exponent, as a failing memory has it."""
    if number == 50:
        weight = model.text.transformer.resblocks[0].mlp.c_fc.weight.data
        weight.view(torch.int32)[3, 5] ^= 1 << 30


def test_a_damaged_weight_is_rolled_back(
    small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    before_each(bit_flip)
    train(request(small_dataset, 120), tmp_path / "run", quiet=True)
    assert names(tmp_path / "run")[-1] == "rolled back"
    back = named(tmp_path / "run", "rolled back")
    assert (back["since"], back["to"], back["rollback"]) == (50, 40, 1)
    assert mean_loss(tmp_path / "run") < 0.1


def one_wild_update(number: int, _: Any, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 1000 if number == 50 else 1


def unclipped(dataset: Path, steps: int = 120) -> Config:
    config = request(dataset, steps)
    return replace(config, optim=replace(config.optim, clip_norm=math.inf))


@pytest.fixture(scope="module")
def spiked(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without clipping in which one update has 1,000 times the rate."""
    run = tmp_path_factory.mktemp("runs") / "spiked"
    with pytest.MonkeyPatch.context() as patch:
        do_before_each(patch, one_wild_update)
        train(unclipped(small_dataset), run, quiet=True)
    return run


def test_a_spike_without_clipping_is_rolled_back(spiked: Path) -> None:
    assert names(spiked) == ["loss spike", "rolled back"]
    spike, back = events(spiked)
    assert spike["since"] == 51
    assert 51 < spike["step"] <= 51 + 4
    assert len(spike["rows"]) == len(spike["row_losses"]) == len(spike["batches"]) == 8
    assert {51} <= set(spike["batches"]) <= set(range(51, spike["step"] + 1))
    assert spike["row_losses"][0] > 2
    assert {jump["batch"] for jump in spike["gradient_jumps"].values()} == {51}
    assert len(spike["largest_gradients"]) == len(spike["largest_update_rms"]) == 3
    assert (back["to"], back["undone"]) == (40, back["step"] - 40)
    at = back["step"]
    lines = {r["step"]: r for r in trained(spiked)}
    assert lines[at]["skipped"] == 0
    assert lines[at + 1]["skipped"] == back["undone"]
    assert lines[at + 1]["lr"] == lines[41]["lr"]
    assert lines[at + 1]["rows_fingerprint"] != lines[41]["rows_fingerprint"]
    assert float(lines[at]["loss"]) > 2 > float(lines[at + 1]["loss"])
    assert {r["clipped"] for r in lines.values()} == {0.0}
    assert mean_loss(spiked) < 0.15


def test_a_run_that_is_killed_after_a_rollback_goes_on_exactly(
    spiked: Path, small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    """Killed in the spike (so that it is met again), and once more behind the rollback."""
    run = tmp_path / "run"

    def killed(kill: int, shift: int) -> Do:
        def do(number: int, model: CLIP, optimizer: torch.optim.Optimizer) -> None:
            if number + shift == kill:
                raise OSError("killed")
            one_wild_update(number + shift, model, optimizer)

        return do

    with pytest.MonkeyPatch.context():
        before_each(killed(53, 0))
        with pytest.raises(OSError, match="killed"):
            train(unclipped(small_dataset), run, quiet=True)
    before_each(killed(40 + 30, 40))
    with pytest.raises(OSError, match="killed"):
        resume(run, quiet=True)
    assert names(run) == ["loss spike", "rolled back"]
    before_each(lambda *_: None)
    resume(run, quiet=True)

    def plain(of: Path) -> list[dict[str, Any]]:
        times = {"time", "samples_per_second", "input_wait"}
        records = [r for r in read_metrics(of / "metrics.jsonl") if r["kind"] in ("train", "event")]
        return [{key: value for key, value in r.items() if key not in times} for r in records]

    assert plain(run) == plain(spiked)
    ends = [checkpoints(of)[-1] for of in (run, spiked)]
    one, other = (load_file(end.path / "model.safetensors") for end in ends)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert load_trainer(ends[0])["watch"] == load_trainer(ends[1])["watch"]


def test_a_run_goes_back_as_often_as_it_may(
    small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    def often(number: int, _: Any, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 1000 if number % 40 == 0 else 1

    before_each(often)
    config = replace(unclipped(small_dataset, 200), stability=Stability(rollbacks=2))
    with pytest.raises(RunError, match=r"rolled back 2 times before.*The first cause: the loss"):
        train(config, tmp_path / "run", quiet=True)
    found = [n for n in names(tmp_path / "run") if n != "loss spike"]
    assert found == ["rolled back", "rolled back", "rate reduced", "stopped"]
    assert named(tmp_path / "run", "rate reduced")["lr_factor"] == Stability.rate_factor


def test_a_rate_100_times_too_high_is_lowered(small_dataset: Path, tmp_path: Path) -> None:
    """With the recipe's own image tower: twelve layers collapse, one does not."""
    recipe = load_recipe("scratch-vit-tiny")
    config = request(small_dataset, 90)
    config = replace(
        config,
        model=replace(
            config.model,
            image=replace(recipe.model.image, image_size=32),
            text=ClipText(width=64, heads=2, layers=2),
        ),
        stages=(Stage(samples=BATCH * 90),),
        optim=replace(recipe.optim, lr=100 * recipe.optim.lr),
    )
    train(config, tmp_path / "run", quiet=True)
    found = names(tmp_path / "run")
    assert found[:3] == ["embeddings alike", "rolled back", "rate reduced"]
    assert "loss spike" not in found  # from a start that guesses worse than embeddings that are one
    back = named(tmp_path / "run", "rolled back")
    assert "the embeddings have collapsed" in back["message"]
    assert back["step"] == back["since"] + 29  # a third of the run
    assert back["to"] == 0
    peak = max(r["lr"]["image"] for r in trained(tmp_path / "run")[:10])
    assert trained(tmp_path / "run")[-1]["lr"]["image"] < 0.1 * peak


@pytest.mark.parametrize(
    ("steps", "batch", "goes_back"), [(60, 32, True), (59, 32, False), (60, 31, False)]
)
def test_a_rate_that_is_too_high_shows_in_the_first_losses(
    steps: int,
    batch: int,
    goes_back: bool,
    small_dataset: Path,
    tmp_path: Path,
    before_each: Callable[[Do], None],
) -> None:
    """One update goes 50 times too far; a short run has no time to begin anew, and
    small batches differ too much."""

    def too_far(number: int, _: Any, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 50 if number == 3 else 1

    before_each(too_far)
    stage = Stage(samples=batch * steps, image_layers="none")
    config = replace(unclipped(small_dataset), batch_size=batch, stages=(stage,))
    train(config, tmp_path / "run", quiet=True)
    losses = [float(r["loss"]) for r in trained(tmp_path / "run")]
    assert losses[3] > 1.4 * losses[0] > 1.4 * math.log(batch)
    said = f"batch 4 is {losses[3]:.2f}, and guessing costs {math.log(batch):.2f}: the rate is too"
    assert any(said in e["message"] for e in events(tmp_path / "run")) == goes_back
    if goes_back:
        assert names(tmp_path / "run")[:2] == ["rolled back", "rate reduced"]
        back = named(tmp_path / "run", "rolled back")
        assert (back["since"], back["to"], back["undone"]) == (4, 0, 4)


def test_a_run_that_ends_where_it_began_says_so(small_dataset: Path, tmp_path: Path) -> None:
    config = request(small_dataset, 20)
    config = replace(
        config,
        optim=replace(config.optim, lr=1e-9),
        evaluate=replace(config.evaluate, split="train"),
    )
    train(config, tmp_path / "run", quiet=True)
    (event,) = events(tmp_path / "run")
    assert (event["step"], event["name"]) == (20, "no better than guessing")
    assert 0 < event["recall"] < 2 * event["chance"] < 0.2


@pytest.mark.parametrize(("steps", "limit"), [(1000, 100), (300, 100), (120, 40), (60, 30)])
def test_embeddings_that_part_again_are_left_alone(steps: int, limit: int) -> None:
    """Logits that hardly differ for a while, as without a warm-up; and for good."""
    told: list[tuple[int, str]] = []
    config = load_recipe("scratch-vit-tiny")
    watch = stability.Watch(config, steps, lambda step, name, *_, **__: told.append((step, name)))

    def alike(cosine: float) -> dict[str, float]:
        return {"image_cosine": cosine, "text_cosine": cosine, "logit_scale": math.log(1 / 0.07)}

    apart, one = alike(0.9), alike(0.9995)  # 1.4 and 0.007 nats
    course = [apart] * 8 + [one] * (limit - 10) + [apart] * 20 + [one] * 150
    backs = [watch._collapse(step, record) for step, record in enumerate(course, 1)]
    first = next(step for step, back in enumerate(backs, 1) if back is not None)
    since = backs[first - 1].since
    last_apart = 8 + limit - 10 + 20
    assert since == last_apart + 1 - 4  # by their median, one is alike with most
    assert first == since + limit - 1
    assert "collapsed" in backs[first - 1].cause
    assert told == [(14, "embeddings alike")]


def test_a_tower_without_gradient_is_refused_before_the_first_update(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = ClipTextTower.features
    monkeypatch.setattr(ClipTextTower, "features", lambda *a: sound(*a).detach())
    with pytest.raises(RequestError, match=r"get no gradient, in the text tower: text\.") as caught:
        train(request(small_dataset, 20), tmp_path / "run", quiet=True)
    (event,) = events(tmp_path / "run")
    assert (event["name"], event["step"]) == ("stopped", 0)
    assert event["message"] == str(caught.value)
    assert not checkpoints(tmp_path / "run")


def test_a_tower_whose_gradient_is_zero_is_named(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captions that all arrive empty: the tower is there, and sees nothing of them."""
    sound = ClipTextTower.features
    monkeypatch.setattr(ClipTextTower, "features", lambda *a: 0 * sound(*a))
    train(request(small_dataset, 20), tmp_path / "run", quiet=True)
    found = {(e["step"], e["name"], e["tower"]) for e in events(tmp_path / "run")}
    assert found == {(1, "no gradient", "image"), (1, "no gradient", "text")}


def test_a_temperature_that_drifts_toward_1_is_named(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captions are sorted by length, to be computed faster, and never put back."""
    sound = TokenStore.batch

    def sorted_by_length(store: TokenStore, numbers: I64, length: int) -> Any:
        return sound(store, numbers[np.argsort(np.diff(store.starts)[numbers])], length)

    monkeypatch.setattr(TokenStore, "batch", sorted_by_length)
    config = request(small_dataset, 60)
    optim = replace(config.optim, temperature=PartRates(lr=0.1))
    train(replace(config, optim=optim), tmp_path / "run", quiet=True)
    event = named(tmp_path / "run", "temperature")
    assert "drifts toward 1" in event["message"]
    assert 1 < event["scale"] < 1 / 0.07 / 4


def test_repeated_overflow_lowers_the_rate(
    small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    """A layer that now and then leaves float16's range, whatever the loss scale."""

    def large(number: int, model: CLIP, _: Any) -> None:
        model.text.ln_final._forward_hooks.clear()
        if number >= 30 and number % 4 == 0:
            model.text.ln_final.register_forward_hook(lambda *seen: seen[2] * 1e8)

    before_each(large)
    config = request(
        small_dataset,
        60,
        precision="fp16",
        loss_scaling=LossScaling(start=1024.0, interval=10),
    )
    train(config, tmp_path / "run", quiet=True)
    steps = [e["step"] for e in events(tmp_path / "run") if e["name"] == "update skipped"]
    injected = list(range(32, 61, 4))
    assert set(injected) <= set(steps)
    reduced = named(tmp_path / "run", "rate reduced")
    assert reduced["step"] == injected[4]
    lines = {r["step"]: r for r in trained(tmp_path / "run")}
    rates = [lines[step]["lr"]["text"] for step in (reduced["step"], reduced["step"] + 1)]
    assert rates[1] == pytest.approx(Stability.rate_factor * rates[0], rel=0.1)


def damage(dataset: Path, rows: list[int]) -> None:
    """Zeros over the second half of some pictures, as a bad sector leaves them."""
    data = Dataset(dataset)
    for row in rows:
        at = data.rows[row]
        with (dataset / data.meta["shards"][at["shard"]]["path"]).open("r+b") as shard:
            shard.seek(int(at["image_offset"]) + int(at["image_length"]) // 2)
            shard.write(bytes(int(at["image_length"]) // 2))


def reading_pictures(dataset: Path, steps: int) -> Config:
    stage = Stage(samples=BATCH * steps, image_layers=1)
    augment = Augment(crop_scale=(0.9, 1.0))
    return replace(request(dataset, steps), stages=(stage,), augment=augment)


@pytest.mark.parametrize("share", [0.3, 0.01])
def test_rows_that_become_unreadable(
    share: float, small_dataset: Path, tmp_path: Path, before_each: Callable[[Do], None]
) -> None:
    """Many stop the run with the first cause; one costs that row."""
    data, run = tmp_path / "dataset", tmp_path / "run"
    shutil.copytree(small_dataset, data)
    rows = Dataset(data).subset("train")
    bad = rows[: max(1, int(share * len(rows)))].tolist()
    before_each(lambda number, *_: damage(data, bad) if number == 10 else None)
    config = reading_pictures(data, 30)
    if share == 0.3:
        with pytest.raises(RunError, match=r"The first: row \d+.*shards/000000\.tar: .*JPEG"):
            train(config, run, quiet=True)
        assert names(run)[-1] == "stopped"
        assert 10 < events(run)[-1]["step"] < 20
        first = named(run, "rows unreadable")
        assert set(first["rows"]) <= set(bad)
        assert f"row {first['rows'][0]}," in events(run)[-1]["message"]
    else:
        train(config, run, quiet=True)
        (event,) = events(run)
        assert (event["name"], event["rows"]) == ("rows unreadable", bad)


def test_settings_that_cannot_work_are_refused(small_dataset: Path, tmp_path: Path) -> None:
    config = request(small_dataset, 20)
    for wrong, message in (
        (Stability(rollbacks=-1), "rollbacks must be at least 0"),
        (Stability(rate_factor=1.0), "rate_factor must lie between 0 and 1"),
        (Stability(patience=0), "patience must be at least 1"),
    ):
        with pytest.raises(RequestError, match=message):
            train(replace(config, stability=wrong), tmp_path / "run", quiet=True)
    bad = replace(config, optim=replace(config.optim, clip_norm=0.0))
    with pytest.raises(RequestError, match="inf switches clipping off"):
        train(bad, tmp_path / "run", quiet=True)
