"""The loop: what it refuses, and that a run broken off anywhere ends as an unbroken one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pennyclip.cli import main
from pennyclip.config.file import load_recipe, to_toml
from pennyclip.config.keys import Stage
from pennyclip.data.index import Dataset
from pennyclip.data.order import Order
from pennyclip.training.folder import _differences
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.weights.checkpoint import best, checkpoints, load_trainer

BATCH, STEPS = 8, 12
SMALL = [
    "--model.image.image-size", "32",
    "--model.text.width", "64",
    "--model.text.heads", "2",
    "--model.text.layers", "2",
    "--batch-size", str(BATCH),
    "--stages.0.epochs", "None",
    "--stages.0.samples", str(BATCH * STEPS),
    "--log-every", "1",
    "--checkpoint.every-steps", "1",
    "--checkpoint.keep", "3",
    "--evaluate.every-epochs", "0.5",
]  # fmt: skip


def command(data: Path, out: Path, *more: str) -> list[str]:
    return ["train", "scratch-vit-tiny", "--data", str(data), "--out", str(out), *SMALL, *more]


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "pennyclip.cli", *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def finish(arguments: list[str], code: int = 0) -> str:
    process = start(arguments)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err.decode()
    return out.decode() + err.decode()


def updates(run: Path) -> list[dict]:
    """What each update did, without the times."""
    keep = ("step", "loss", "lr", "grad_norm", "logit_scale", "rows_fingerprint")
    keep += ("accuracy", "samples")
    records = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]
    return [{key: r[key] for key in keep} for r in records]


def assert_equal_runs(one: Path, other: Path) -> None:
    assert updates(one) == updates(other)
    assert len(updates(one)) == STEPS
    last = [checkpoints(run)[-1] for run in (one, other)]
    assert [c.step for c in last] == [STEPS, STEPS]
    first, second = (load_file(c.path / "model.safetensors") for c in last)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    one_state, other_state = (load_trainer(c)["optimizer"] for c in last)
    assert one_state.keys() == other_state.keys()
    for name, state in one_state.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other_state[name][key]))


@pytest.fixture(scope="module")
def straight(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "straight"
    finish(command(small_dataset, run))
    return run


def test_rows_come_in_the_order_of_the_stream(straight: Path, small_dataset: Path) -> None:
    from zlib import crc32

    rows = Dataset(small_dataset).subset("train")
    for record in updates(straight):
        order, _ = Order(load_recipe("scratch-vit-tiny").seed, np.array([len(rows)])).at(
            (record["step"] - 1) * BATCH, BATCH
        )
        assert record["rows_fingerprint"] == crc32(rows[order].tobytes())


def test_a_killed_run_resumed_equals_an_unbroken_one(
    straight: Path, small_dataset: Path, tmp_path: Path
) -> None:
    """Killed at step 7, and with another number of loader workers afterwards."""
    run = tmp_path / "killed"
    process = start(command(small_dataset, run, "--workers", "0"))
    while len(updates(run) if (run / "metrics.jsonl").is_file() else []) < 7:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoints(run)[-1].step >= 6
    assert "peak rate" not in finish(["train", "--resume", str(run)])  # it was told before
    assert_equal_runs_but_for_workers(straight, run)


def assert_equal_runs_but_for_workers(one: Path, other: Path) -> None:
    assert_equal_runs(one, other)
    assert "workers = 0" in (other / "config.toml").read_text()
    assert "workers = 2" in (one / "config.toml").read_text()


def test_a_kill_inside_a_save_loses_nothing(
    straight: Path, small_dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "killed"
    process = start(command(small_dataset, run))
    pattern = ".step_000007.*.tmp/model.safetensors"
    while not list((run / "checkpoints").glob(pattern)):
        assert process.poll() is None, "the run ended before it could be killed inside a save"
    process.send_signal(signal.SIGKILL)
    process.wait()
    (partial,) = (run / "checkpoints").glob(".step_000007.*.tmp")
    assert checkpoints(run)[-1].step == 6
    text = finish(command(small_dataset, run), code=2)
    assert "unfinished at update 6 of 12" in text
    finish(command(small_dataset, run, "--continue"))
    assert not partial.exists()
    assert_equal_runs(straight, run)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_update_and_saves(
    number: signal.Signals, code: int, straight: Path, small_dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "stopped"
    process = start(command(small_dataset, run, "--checkpoint.every-steps", "None"))
    while len(updates(run) if (run / "metrics.jsonl").is_file() else []) < 3:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.005)
    process.send_signal(number)
    process.wait(60)
    assert process.returncode == code
    done = checkpoints(run)[-1].step
    assert done == updates(run)[-1]["step"]
    assert 3 <= done < STEPS
    assert read_metrics(run / "metrics.jsonl")[-1]["reason"] == f"signal {number.name}"
    finish(["train", "--resume", str(run)])
    assert_equal_runs(straight, run)


def test_newest_and_best_checkpoints_are_kept(straight: Path) -> None:
    found = checkpoints(straight)
    scores = {
        r["step"]: r["metrics"]["mean_recall"]
        for r in read_metrics(straight / "metrics.jsonl")
        if r["kind"] == "eval"
    }
    top = best(found)
    assert top is not None
    assert scores[top.step] == top.score == max(scores.values())
    assert {c.step for c in found} == {10, 11, 12, top.step}


def test_the_same_request_finished_is_a_no_op(straight: Path, small_dataset: Path) -> None:
    before = (straight / "metrics.jsonl").read_bytes()
    assert "finished after 12 updates" in finish(command(small_dataset, straight))
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_a_full_disk_during_a_save_loses_nothing(
    straight: Path, small_dataset: Path, tmp_path: Path
) -> None:
    """No file may grow past 4 MB, so every save fails inside model.safetensors."""
    run = tmp_path / "full"
    process = start(command(small_dataset, run))
    while not checkpoints(run):
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = checkpoints(run)[-1]
    kept = {p: p.read_bytes() for p in saved.path.rglob("*") if p.is_file()}
    limited = (
        "import resource, signal, sys; from pennyclip.cli import main;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20));"
        f"sys.exit(main(['train', '--resume', {str(run)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, timeout=300)
    assert done.returncode == 1
    assert b"could not be written" in done.stderr
    assert b"Make room, then go on with" in done.stderr
    records = read_metrics(run / "metrics.jsonl")
    failed = [r["step"] for r in records if r.get("name") == "checkpoint failed"]
    assert failed == list(range(saved.step + 1, STEPS + 1))
    assert checkpoints(run)[-1].step == saved.step
    assert {p: p.read_bytes() for p in kept} == kept
    finish(["train", "--resume", str(run)])
    assert_equal_runs(straight, run)


def test_a_request_that_failed_before_training_can_be_corrected(
    small_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(command(small_dataset, run, "--model.image.name", "vit_tinny")) == 2
    assert main(command(small_dataset, run, "--optim.name", "adamm")) == 2
    assert "known are adamw, stable-adamw, lion, lamb" in capsys.readouterr().err
    assert main(command(small_dataset, run, "--stages.0.samples", "16")) == 0


def test_a_later_stage_that_cannot_be_is_refused_before_the_first_update(
    small_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    config = load_recipe("scratch-vit-tiny")
    for bad, message in (
        (Stage(epochs=1.0, image_layers=99), "image_layers = 99"),
        (Stage(epochs=1.0, image_size=40), "image_size = 40 is no multiple of the 16 pixel"),
        (Stage(epochs=1.0, image_layers="none", mask_ratio=0.5), "mask_ratio is set"),
    ):
        recipe.write_text(to_toml(replace(config, stages=(Stage(epochs=1.0), bad))))
        arguments = ["train", str(recipe), "--data", str(small_dataset), "--out"]
        assert main([*arguments, str(tmp_path / "run"), "--batch-size", "8"]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch-size", "4000"], "fewer than batch_size"),
        (["--batch-size", "1"], "batch_size = 1"),
        (["--optim.warmup-steps", "500"], "never reach its peak"),
        (["--optim.warmup-step", "5"], "Did you mean 'warmup_steps'?"),
        (["--loss", "infonze"], "known are infonce"),
        (["--subset", "trian"], "no subset 'trian'. It has: dev, train, val"),
        (["--model.image.name", "vit_tinny"], "has no model 'vit_tinny'"),
    ],
)
def test_requests_that_would_not_do_what_they_say_exit_with_2(
    more: list[str],
    message: str,
    small_dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        code = main(command(small_dataset, tmp_path / "run", *more))
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.rglob("*.safetensors"))


def test_another_request_into_the_same_folder_exits_with_2(
    straight: Path, small_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(small_dataset, straight, "--optim.lr", "0.1")) == 2
    error = capsys.readouterr().err
    assert error.endswith("Different:\n  optim.lr: there 0.0005, asked 0.1\n")
    assert "Choose another --out" in error
    assert main(command(small_dataset, straight / "checkpoints")) == 2
    assert "is not a run of pennyclip" in capsys.readouterr().err
    assert main(["train", "scratch-vit-tiny", "--out", str(straight.parent / "nowhere")]) == 2
    assert "add --data DATASET" in capsys.readouterr().err


def test_recall_is_told_beside_chance(
    straight: Path, small_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One caption a picture: the mean of 1, 5 and 10 in as many as there are of dev or val."""
    sizes = {split: len(Dataset(small_dataset).subset(split)) for split in ("dev", "val")}
    means = {split: sum(min(1, k / n) for k in (1, 5, 10)) / 3 for split, n in sizes.items()}
    assert main(command(small_dataset, straight)) == 0
    assert f"(chance {means['dev']:.1%})" in capsys.readouterr().out
    argv = ["eval", "retrieval", str(straight.parent / "copy"), "--data", str(small_dataset)]
    shutil.copytree(straight, straight.parent / "copy")
    assert main(argv) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {name: rest for name, *rest in lines}
    assert found["images"] == [str(sizes["val"])]
    assert found["mean_recall"][1:] == ["chance", f"{means['val']:.4f}"]


def test_differences_are_told_a_line_a_key() -> None:
    old = {"seed": 1, "stages": [{"epochs": 1.0}, {"epochs": 2.0}], "optim": {"lr": 1e-3}}
    new = {"seed": 1, "stages": [{"epochs": 1.0, "lr_factor": 0.5}], "optim": {"lr": 1e-4}}
    assert _differences(old, new) == [
        "stages.0.lr_factor: there unset, asked 0.5",
        "stages.1.epochs: there 2.0, asked unset",
        "optim.lr: there 0.001, asked 0.0001",
    ]


def test_answers_as_json(
    straight: Path, small_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(small_dataset, straight), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["finished"] is True
    assert answer["steps"] == STEPS
    assert main(["train", "--resume", str(straight / "nowhere"), "--json"]) == 2
    assert "config.toml" in json.loads(capsys.readouterr().out)["error"]


def test_a_kill_inside_the_removal_of_an_old_checkpoint_loses_nothing(tmp_path: Path) -> None:
    """A kill -9 between rmtree's last unlink and its rmdir leaves an empty folder."""
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    whole = tmp_path / "checkpoints" / "step_000004"
    whole.mkdir()
    (whole / "meta.json").write_text('{"step": 4, "score": null}')
    assert [c.step for c in checkpoints(tmp_path)] == [4]


def test_a_refused_request_leaves_the_folder_free(small_dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = ["train", "scratch-vit-tiny", "--data", str(small_dataset), "--out", str(run)]
    argv += ["--batch-size", "8", "--model.image.name", "vit_nonsense"]
    assert main(argv) == 2
    assert not (run / "config.toml").exists()


def test_an_output_that_is_a_file_is_a_wrong_request(small_dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    argv = ["train", "scratch-vit-tiny", "--data", str(small_dataset), "--out", str(file)]
    assert main([*argv, "--batch-size", "8"]) == 2


def test_all_that_a_run_can_switch_on_resumes_exactly_too(
    small_dataset: Path, wordnet: Path, tmp_path: Path
) -> None:
    """Sigmoid loss, masked images, gradient caching, LAMB, bf16, two stages, a windowed shuffle,
    and every augmentation."""
    config = load_recipe("scratch-vit-tiny")
    stages = (
        Stage(samples=40, mask_ratio=(0.75, 0.5), image_size=32, text_length=16, text_layers=1),
        Stage(samples=56, image_size=48, lr_factor=0.5, new_lr_factor=0.1),
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(replace(config, stages=stages)))
    small = [a for a in SMALL if not a.startswith("--stages")]
    for value in ("None", str(BATCH * STEPS)):
        small.remove(value)
    more = ["--loss", "sigmoid", "--optim.name", "lamb", "--micro-batch", "3", "--ema-decay", "0.9"]
    arguments = ["train", str(recipe), "--data", str(small_dataset), *small, *more]
    arguments += ["--precision", "bf16", "--model.head-dropout", "0.1", "--shuffle-window", "20"]
    for name in ("flip", "color-jitter", "word-dropout", "synonyms"):
        arguments += [f"--augment.{name}", "0.3"]
    arguments += ["--augment.wordnet", str(wordnet), "--out"]
    finish([*arguments, str(tmp_path / "straight")])
    process = start([*arguments, str(tmp_path / "broken")])
    metrics = tmp_path / "broken" / "metrics.jsonl"
    while not metrics.is_file() or len(updates(tmp_path / "broken")) < 4:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finish(["train", "--resume", str(tmp_path / "broken")])
    assert_equal_runs(tmp_path / "straight", tmp_path / "broken")
    rates = updates(tmp_path / "straight")[-1]["lr"]
    assert rates["text.new"] == pytest.approx(0.1 * rates["text"])
    weights = load_file(checkpoints(tmp_path / "straight")[-1].path / "model.safetensors")
    assert weights["logit_bias"] < -9  # the sigmoid's, from -10 on
    assert weights["visual.trunk.pos_embed"].shape[1] == 1 + 9  # 48 px in patches of 16
