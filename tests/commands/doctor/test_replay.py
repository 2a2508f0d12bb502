"""A batch computed again has the loss that it had in the run, to the bit, and names its rows."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from faulty_runs import do_before_each, events, named, nan_in_a_layer, request, trained
from pennyclip.base.errors import RunError
from pennyclip.cli import main
from pennyclip.commands.doctor.replay import _course
from pennyclip.config.file import load_recipe
from pennyclip.config.keys import Augment, Checkpointing, Stability, Stage
from pennyclip.data.order import Order
from pennyclip.data.prepare import prepare
from pennyclip.model.clip import CLIP
from pennyclip.training.loop import train
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.weights.checkpoint import checkpoints
from small_runs import small_run

BATCH, STEPS = 8, 80
SPIKE, FIRST_RISE, SECOND_RISE = range(31, 34), range(46, 52), range(65, 71)
AMOUNTS = ("none", "little", "much", "full")
Replay = Callable[..., dict[str, Any]]


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """What `pennyclip doctor RUN --replay STEP` tells programs."""

    def replayed(run: Path, step: int) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["doctor", str(run), "--replay", str(step), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return replayed


def bad_rows(step: int) -> set[int]:
    """Every second row of a batch of the one epoch."""
    order = Order(load_recipe("scratch-vit-tiny").seed, np.array([BATCH * STEPS]))
    return set(order.at((step - 1) * BATCH, BATCH)[0][::2].tolist())


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch over colours and their names, with wrong names in half of the rows of some
    batches: a spike, and two rises that it goes back from. It keeps one checkpoint."""
    folder = tmp_path_factory.mktemp("faulty")
    bad = set.union(*(bad_rows(step) for step in (*SPIKE, *FIRST_RISE, *SECOND_RISE)))
    random, lines = np.random.default_rng(0), []
    for row in range(BATCH * STEPS):
        colour = random.integers(0, len(AMOUNTS), 3)
        pixels = 22 + 70 * colour + random.integers(-20, 21, (16, 16, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{row}.png")
        said = (AMOUNTS[(amount + 2 * (row in bad)) % len(AMOUNTS)] for amount in colour)
        caption = "red {} green {} blue {}, number {}".format(*said, row)
        lines.append(json.dumps({"image": f"{row}.png", "caption": caption}) + "\n")
    (folder / "captions.jsonl").write_text("".join(lines))
    prepare([str(folder / "captions.jsonl")], folder / "data", dev_share=0, val_share=0, workers=1)
    config = request(
        folder / "data",
        STEPS,
        batch_size=BATCH,
        stages=(Stage(samples=BATCH * STEPS, image_layers="none"),),
        optim=replace(load_recipe("scratch-vit-tiny").optim, lr=5e-3),
        checkpoint=Checkpointing(every_steps=7, keep=1),
    )
    train(config, folder / "run", quiet=True)
    return folder / "run"


def saved_before(run: Path, batch: int) -> int:
    saved = [r["step"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "checkpoint"]
    return max(step for step in saved if step < batch)


def test_the_batch_behind_a_spike_is_there_to_the_end(
    faulty: Path, replay: Replay, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `keep = 1`, long after."""
    spike = named(faulty, "loss spike")
    since, begin = spike["since"], saved_before(faulty, spike["since"])
    assert since <= SPIKE[0] < spike["step"] <= SPIKE[-1]
    assert begin == checkpoints(faulty)[0].step
    capsys.readouterr()
    assert main(["doctor", str(faulty), "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["events"]["loss spike"]["do"]
    assert re.findall(r"doctor (\S+) --replay (\d+)", advice) == [(str(faulty), str(since))]
    for step in SPIKE:
        found = replay(faulty, step)
        assert (found["from_step"], found["updates_before"]) == (begin, step - 1 - begin)
        assert found["loss"] == found["recorded_loss"] == trained(faulty)[step - 1]["loss"] > 4
        assert found["grad_norm"] == trained(faulty)[step - 1]["grad_norm"]
        assert (found["compared"], found["differs_from"]) == (step - begin, None)
        assert {row["row"] for row in found["rows"][: BATCH // 2]} == bad_rows(step)


def test_what_a_rollback_undid_is_left_out(faulty: Path, tmp_path: Path, replay: Replay) -> None:
    """Where the checkpoints that the two rollbacks wrote are gone. The second lowers the rate."""
    back = [e for e in events(faulty) if e["name"] == "rolled back"]
    (to, at), (second_to, second_at) = ((e["to"], e["step"]) for e in back)
    assert named(faulty, "rate reduced")["step"] == second_at
    first = saved_before(faulty, named(faulty, "loss spike")["since"])
    latest = saved_before(faulty, back[1]["since"])
    kept = [c.step for c in checkpoints(faulty)]
    assert {first, latest, STEPS} <= set(kept)
    assert len(kept) <= 4
    run = tmp_path / "run"
    shutil.copytree(faulty, run)
    for checkpoint in checkpoints(run):
        if checkpoint.step not in (first, latest):
            shutil.rmtree(checkpoint.path)
    assert to < at < latest < second_at
    for step, begin, updates in (
        (at, first, at - 1 - first),
        (at + 4, first, to - first + 3),
        (second_at, latest, second_at - 1 - latest),
        (second_at + 1, first, second_to - first),
        (STEPS, first, second_to - first + STEPS - 1 - second_at),
    ):
        found = replay(run, step)
        assert (found["from_step"], found["updates_before"]) == (begin, updates)
        assert found["loss"] == found["recorded_loss"] == trained(faulty)[step - 1]["loss"]
        assert found["differs_from"] is None


def test_rollbacks_that_were_undone_themselves() -> None:
    assert _course([], 20, 57) == [(20, 57)]
    assert _course([(40, 60)], 20, 60) == [(20, 60)]
    assert _course([(40, 60)], 20, 61) == [(20, 40), (60, 61)]
    assert _course([(40, 60)], 60, 65) == [(60, 65)]
    assert _course([(40, 60), (30, 70)], 20, 76) == [(20, 30), (70, 76)]
    assert _course([(40, 60), (60, 70)], 20, 76) == [(20, 40), (60, 60), (70, 76)]
    assert _course([(40, 60), (65, 70)], 20, 69) == [(20, 40), (60, 69)]
    assert _course([(0, 9), (0, 30)], 0, 31) == [(0, 0), (30, 31)]


def test_stages_masks_and_gradient_caching(
    small_dataset: Path, tmp_path: Path, replay: Replay
) -> None:
    """From the first weights over a change of size, mask and layers, with what frozen ones stored;
    also where only some losses were logged."""
    recipe = load_recipe("scratch-vit-tiny")
    model = small_run(small_dataset).model
    image = replace(model.image, name="test_vit", image_size=64)
    config = small_run(
        small_dataset,
        model=replace(model, image=image, head_dropout=0.1),
        stages=(
            Stage(samples=40, image_size=32, mask_ratio=(0.75, 0.25)),
            Stage(samples=24, mask_ratio=0.5, text_length=24),
            Stage(samples=40, image_layers="none", lr_factor=0.5),
        ),
        augment=Augment(crop_scale=(0.6, 1.0), flip=0.5, word_dropout=0.1),
        micro_batch=3,
        optim=replace(recipe.optim, name="lamb", warmup_steps=4),
        checkpoint=Checkpointing(keep=1),
        log_every=4,
    )
    run = tmp_path / "run"
    train(config, run, quiet=True)
    assert [c.step for c in checkpoints(run)] == [13]
    assert [r["step"] for r in trained(run)] == [4, 5, 8, 12, 13]
    found = replay(run, 12)
    assert (found["from_step"], found["updates_before"]) == (0, 11)
    assert found["loss"] == found["recorded_loss"] == trained(run)[3]["loss"]
    assert (found["compared"], found["differs_from"]) == (4, None)
    found = replay(run, 7)
    assert (found["recorded_loss"], found["compared"], found["differs_from"]) == (None, 2, None)


def test_other_weights_than_the_run_had_are_told(
    faulty: Path, tmp_path: Path, replay: Replay, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that was lost changes nothing; a record of another machine and loss does."""
    run = tmp_path / "run"
    shutil.copytree(faulty, run)
    first = checkpoints(run)[0]
    assert first.step < 31
    shutil.rmtree(first.path)
    whole = replay(run, 31)
    assert (whole["from_step"], whole["updates_before"], whole["differs_from"]) == (0, 30, None)
    records = read_metrics(run / "metrics.jsonl")
    records[0]["machine"]["host"] = "elsewhere"
    changed = next(r for r in records if r["kind"] == "train" and r["step"] == 30)
    changed["loss"] += 1e-7
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert replay(run, 31)["differs_from"] == 30
    assert main(["doctor", str(run), "--replay", "31"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("batch 31: from the first weights, 30 updates made again; loss ")
    assert "Losses differ from batch 30 on, so these weights are others (host elsewhere" in line
    assert main(["doctor", str(faulty), "--replay", "31"]) == 0
    captured = capsys.readouterr()
    loss, begin = trained(faulty)[30]["loss"], first.step
    assert captured.out.splitlines()[0] == (
        f"batch 31: from checkpoint {begin}, {30 - begin} updates made again; loss {loss:.4f}, as "
        "in the run"
    )
    pairs = (31 - begin) * BATCH
    assert f"pairs again {pairs}/{pairs} (100%)" in captured.err


def test_a_step_to_which_the_run_has_not_come_is_refused(
    faulty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed at step 40 of 80."""
    run = tmp_path / "run"
    shutil.copytree(faulty, run)
    for checkpoint in checkpoints(run):
        if checkpoint.step > 40:
            shutil.rmtree(checkpoint.path)
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    left = [json.dumps(r) + "\n" for r in records if r["step"] <= 40]
    (run / "metrics.jsonl").write_text("".join(left))
    assert main(["doctor", str(run), "--replay", "60"]) == 2
    said = capsys.readouterr().err
    assert "--replay 60: the run has steps 1 to 40 of 80 so far (still going, or killed, at" in said
    assert main(["doctor", str(run), "--replay", "40"]) == 0
    (run / "metrics.jsonl").write_text(left[0])
    assert main(["doctor", str(run), "--replay", "1"]) == 2
    assert "--replay 1: no step was made" in capsys.readouterr().err


def test_a_norm_that_overflows_is_not_the_rows_fault(
    small_dataset: Path,
    tmp_path: Path,
    replay: Replay,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its batch is recorded with its loss, though only every tenth is otherwise."""

    def steep(number: int, model: CLIP, _: Any) -> None:
        layer = model.visual.head.proj
        layer._forward_hooks.clear()
        if number == 5:
            layer.register_forward_hook(
                lambda *seen: seen[2].register_hook(lambda gradient: gradient * 1e25) and None
            )

    run = tmp_path / "run"
    do_before_each(monkeypatch, steep)
    train(request(small_dataset, 6, log_every=10), run, quiet=True)
    skipped, last = trained(run)
    assert [(r["step"], r["skipped"]) for r in (skipped, last)] == [(5, 1), (6, 1)]
    event = named(run, "update skipped")
    assert (event["tensor"], event["parameter"]) == (
        "the norm of the gradient",
        "visual.head.proj.weight",
    )
    assert 1e19 < event["largest"] < 1e30
    do_before_each(monkeypatch, steep)
    found = replay(run, 5)
    assert found["loss"] == found["recorded_loss"] == skipped["loss"]
    assert found["not_finite"]["largest"] == event["largest"]
    assert found["even_share"] == 1 / 16
    do_before_each(monkeypatch, steep)
    assert main(["doctor", str(run), "--replay", "5"]) == 0
    first, _, cause, *_, end = capsys.readouterr().out.splitlines()
    assert first.endswith(", as in the run")
    assert cause == (
        "not finite: the norm of the gradient. Every layer's gradient is finite, up to "
        f"{event['largest']:.2g} in visual.head.proj.weight, and only their norm overflows: the "
        "rate is too high or weights have grown. A row is to blame only if its share of the "
        "gradient stands out"
    )
    assert end.startswith("An even share of the gradient is 6.2%: a row is only worth taking out")


def test_a_stop_gives_a_command_that_can_be_pasted(
    small_dataset: Path,
    tmp_path: Path,
    replay: Replay,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And is not told again where a step is asked for that the run has not."""
    run = tmp_path / "my run"
    do_before_each(monkeypatch, nan_in_a_layer(lambda number: number >= 3))
    config = request(small_dataset, 9, stability=Stability(rollbacks=0, patience=1))
    with pytest.raises(RunError) as stopped:
        train(config, run, quiet=True)
    assert f"Look at the batch with: pennyclip doctor '{run}' --replay 3;" in str(stopped.value)
    assert named(run, "stopped")["message"] == str(stopped.value)
    assert [r["step"] for r in trained(run)] == [1, 2]  # the event has the loss of the third
    do_before_each(monkeypatch, nan_in_a_layer(lambda number: number >= 3))
    found = replay(run, 3)
    assert found["loss"] == found["recorded_loss"] == named(run, "update skipped")["loss"] == "nan"
    assert (found["compared"], found["differs_from"]) == (3, None)
    assert main(["doctor", str(run), "--replay", "90"]) == 2
    assert capsys.readouterr().err == (
        "pennyclip: --replay 90: the run has steps 1 to 3 of 9 so far (stopped at step 3)\n"
    )
