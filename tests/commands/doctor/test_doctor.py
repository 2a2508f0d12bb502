"""What the doctor says of a run, and that a replayed batch is the one that was."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pennyclip.cli import main
from pennyclip.commands.doctor.events import over_fitting
from pennyclip.config.file import load_recipe, to_toml
from pennyclip.config.keys import Config
from pennyclip.data.index import Dataset
from pennyclip.data.order import Order
from pennyclip.model.text_clip import ClipTextTower
from pennyclip.reporting.run import read_run
from pennyclip.training import run as ready
from pennyclip.training.telemetry.events import REMEDIES
from pennyclip.training.telemetry.metrics import Metrics, read_metrics
from pennyclip.training.update import update as update_module
from pennyclip.weights.checkpoint import checkpoints

ROOT = Path(__file__).resolve().parents[3]
BATCH = 16
ARGUMENTS = [
    "--model.image.name", "test_vit",
    "--model.image.image-size", "32",
    "--model.embed-dim", "32",
    "--model.text.width", "32",
    "--model.text.heads", "2",
    "--model.text.layers", "1",
    "--model.head-dropout", "0.2",
    "--batch-size", str(BATCH),
    "--stages.0.epochs", "None",
    "--stages.0.samples", str(BATCH * 12),
    "--log-every", "1",
    "--checkpoint.every-steps", "5",
    "--checkpoint.keep", "9",
    "--evaluate.every-epochs", "1000",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    argv = ["train", "scratch-vit-tiny", "--data", str(small_dataset), "--out", str(out)]
    assert main([*argv, *ARGUMENTS]) == 0
    return out


def strict(text: str) -> Any:
    """JSON as the standard has it, without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["doctor", *argv, "--json"]) == 0
    return strict(capsys.readouterr().out)


def test_a_replayed_batch_is_the_one_that_was(
    run: Path, small_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With random crops and dropout: the same loss to the bit where a checkpoint stands before."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    record = next(
        r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train" and r["step"] == 6
    )
    found = answer(capsys, str(run), "--replay", "6")
    assert (found["from_step"], found["updates_before"]) == (5, 0)
    assert found["loss"] == found["recorded_loss"] == record["loss"]
    assert found["grad_norm"] == record["grad_norm"]
    assert found["not_finite"] is None
    rows = Dataset(small_dataset).subset("train")
    order = Order(load_recipe("scratch-vit-tiny").seed, np.array([len(rows)]))
    indices, _ = order.at(5 * BATCH, BATCH)
    shown = [row["row"] for row in found["rows"]]
    assert set(shown) <= set(rows[indices].tolist())
    losses = [row["loss"] for row in found["rows"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < record["loss"] + 0.5
    assert losses[0] > record["loss"]
    assert 0.3 < sum(row["gradient_share"] for row in found["rows"]) < 1
    assert found["rows"][0]["captions"] == Dataset(small_dataset).captions(shown[0])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    later = answer(capsys, str(run), "--replay", "9")
    assert (later["from_step"], later["updates_before"]) == (5, 3)
    assert later["loss"] == later["recorded_loss"]
    assert (later["compared"], later["differs_from"]) == (4, None)
    first = answer(capsys, str(run), "--replay", "1")
    assert (first["from_step"], first["loss"]) == (0, first["recorded_loss"])


def test_losses_by_row_have_the_loss_as_their_mean() -> None:
    import torch.nn.functional as F

    from pennyclip.loss import LOSSES, Features
    from pennyclip.loss.row_losses import row_losses

    torch.manual_seed(0)
    image, text = (F.normalize(torch.randn(7, 5, dtype=torch.float64), dim=1) for _ in range(2))
    features = Features(
        image=image,
        text=text,
        all_image=image,
        all_text=text,
        offset=0,
        scale=torch.tensor(9.0, dtype=torch.float64),
        bias=None,
        groups=torch.tensor([0, 1, 2, 1, 4, 5, 4]),
    )
    value, _ = LOSSES["infonce"].compute(features)
    assert row_losses(features).mean() == pytest.approx(float(value), rel=1e-6)


def test_a_replay_names_the_tensor_and_the_row(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = ClipTextTower.features

    def broken(tower: ClipTextTower, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        features = sound(tower, tokens, lengths)
        if len(features) == BATCH:
            features[3] = torch.nan
        return features

    monkeypatch.setattr(ClipTextTower, "features", broken)
    found = answer(capsys, str(run), "--replay", "6")
    assert found["not_finite"]["tensor"] == "the text embedding"
    assert found["loss"] == "nan"
    (row,) = found["not_finite"]["rows"]
    assert (found["rows"][0]["row"], found["rows"][0]["finite"]) == (row, False)
    assert all(entry["finite"] for entry in found["rows"][1:])
    assert main(["doctor", str(run), "--replay", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "not finite: the text embedding" in lines
    assert any(line.split()[:3] == [str(row), "not", "finite"] for line in lines)


def test_a_replay_outlives_a_shortage_of_memory(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes behind the loss, in the backward pass; the second try has half the pairs."""
    whole = answer(capsys, str(run), "--replay", "6")
    sound, calls = update_module._mean_cosine, []

    def short(embeddings: torch.Tensor) -> torch.Tensor:
        calls.append(len(embeddings))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sound(embeddings)

    monkeypatch.setattr(update_module, "_mean_cosine", short)
    found = answer(capsys, str(run), "--replay", "6")
    assert len(calls) == 3
    assert found["loss"] == pytest.approx(whole["loss"], abs=0.3)  # dropout draws anew
    assert 0.3 < sum(row["gradient_share"] for row in found["rows"]) < 1


def test_a_replay_takes_the_micro_batch_that_the_run_came_down_to(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (last,) = (c for c in checkpoints(copy) if c.step == 5)
    trainer = torch.load(last.path / "trainer.pt", weights_only=False)
    torch.save(trainer | {"micro_batch": 4}, last.path / "trainer.pt")
    sizes = []
    sound = ready.update

    def seen(*args: Any, **options: Any) -> dict[str, Any]:
        sizes.append(options["micro_batch"])
        return sound(*args, **options)

    monkeypatch.setattr(ready, "update", seen)
    answer(capsys, str(copy), "--replay", "6")
    assert sizes == [4]


def test_a_step_that_was_never_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(run), "--replay", "13"]) == 2
    assert "the run has steps 1 to 12" in capsys.readouterr().err
    assert main(["doctor", str(run / "nowhere")]) == 2
    assert checkpoints(run)


def test_events_are_summed_up_with_a_remedy(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(capsys, str(run))["events"] == {}
    config: Config = load_recipe("scratch-vit-tiny")
    (tmp_path / "config.toml").write_text(to_toml(config))
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for step in (7, 9, 9):
        metrics.log("event", step, name="update skipped", message=f"in {step}")
    metrics.close()
    (name,) = (found := answer(capsys, str(tmp_path))["events"])
    assert name == "update skipped"
    assert found[name] == {
        "count": 3,
        "first": 7,
        "last": 9,
        "message": "in 7",
        "do": REMEDIES["update skipped"].replace("STEP", "7").replace("RUN", str(tmp_path)),
    }


def test_what_a_resume_has_undone_is_told_as_past(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two overflows and a full disk behind the checkpoint of step 6; one overflow comes again."""
    (tmp_path / "config.toml").write_text(to_toml(load_recipe("scratch-vit-tiny")))
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.log("start", 0)
    for step in (3, 8, 9):
        metrics.log("event", step, name="update skipped", message=f"in {step}")
    metrics.log("event", 9, name="stopped", message="the disk is full")
    metrics.log("end", 9, reason="error")
    metrics.close()
    before = answer(capsys, str(tmp_path))
    assert [(n, e["count"]) for n, e in before["events"].items()] == [
        ("update skipped", 3),
        ("stopped", 1),
    ]
    assert before["past"] == []
    metrics = Metrics(tmp_path / "metrics.jsonl", resume_step=6)
    metrics.log("start", 6)
    metrics.log("event", 8, name="update skipped", message="in 8")
    metrics.log("end", 12, reason="finished")
    metrics.close()
    found = answer(capsys, str(tmp_path))
    (event,) = found["events"].values()
    assert (event["count"], event["first"], event["last"]) == (2, 3, 8)
    assert [(e["name"], e["why"], e["count"], e["first"]) for e in found["past"]] == [
        ("update skipped", "undone by a resume from before it", 2, 8),
        ("stopped", "resumed since", 1, 9),
    ]
    assert found["unfinished"] is None
    assert main(["doctor", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "    stopped (step 9), resumed since: the disk is full" in told
    assert sum(line.startswith("    do:") for line in told) == 1


def test_an_unfinished_run_and_over_fitting_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 pictures: at a recall of 50 % the standard error is 5 points."""
    (tmp_path / "config.toml").write_text(to_toml(load_recipe("scratch-vit-tiny")))
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.log("start", 0)
    for step, recall, loss in ((36, 0.5, 1.5), (48, 0.44, 1.0), (60, 0.43, 0.5), (72, 0.44, 0.3)):
        found = {"text_to_image/R@1": recall, "mean_recall": recall, "images": 100.0}
        metrics.log("train", step, loss=loss)
        metrics.log("eval", step, split="dev", metrics=found)
    metrics.log("event", 73, name="rolled back", message="rose", since=70)
    metrics.log("end", 75, reason="signal SIGINT")
    metrics.close()
    told = answer(capsys, str(tmp_path))
    assert told["unfinished"] == "stopped at step 75: signal SIGINT"
    assert told["over_fitting"] == (
        "mean recall on 'dev' was highest at step 36 (50.0%) and is 44.0% at step 72, while the "
        "training loss fell from 1.50 to 0.30"
    )
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "do: Batch 70 was the first that was not well" in out
    assert f"pennyclip doctor {tmp_path} --replay 70." in out
    assert f"pennyclip train --resume {tmp_path}" in out


@pytest.mark.parametrize("later", [(0.46, 0.44, 0.46), (0.44, 0.44), (0.2, 0.2, 0.49)])
def test_a_dip_within_chance_is_no_over_fitting(tmp_path: Path, later: tuple[float, ...]) -> None:
    (tmp_path / "config.toml").write_text("batch_size = 8\n")
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for step, recall in enumerate((0.3, 0.5, *later), start=1):
        found = {"text_to_image/R@1": recall, "mean_recall": recall, "images": 100.0}
        metrics.log("train", step, loss=1 / step)
        metrics.log("eval", step, split="dev", metrics=found)
    metrics.close()
    assert over_fitting(read_run(tmp_path)) is None


def test_every_event_has_a_remedy_and_a_line_in_the_docs() -> None:
    page = (ROOT / "docs/when-it-goes-wrong.md").read_text(encoding="utf-8")
    assert [name for name in REMEDIES if f"| {name} |" not in page] == []
