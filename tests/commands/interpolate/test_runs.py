"""`pennyclip interpolate` between two stages of learning of MiniLM and EfficientNet-Lite0."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pennyclip
from pennyclip.base.errors import RequestError
from pennyclip.cli import main
from pennyclip.commands.interpolate.runs import held_out_notes, start_of
from pennyclip.config.file import to_toml
from pennyclip.config.keys import ClipText, Config, ImageTower, Model, Stage
from pennyclip.evaluation.task import Task
from pennyclip.model.clip import CLIP
from pennyclip.weights.checkpoint import Scores, choose, save

ROOT = Path(__file__).resolve().parents[3]
ALPHAS = ["--alphas", "0", "0.5", "1"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def runs(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Heads alone, and from there the last layers of both towers, at a rate that does harm."""
    folder = tmp_path_factory.mktemp("interpolate")
    common = ["train", "frozen-lite0-minilm", "--data", str(small_dataset), "--batch-size", "16"]
    common += ["--stages.0.epochs", "None", "--evaluate.every-epochs", "9"]
    first, second = folder / "first", folder / "second"
    assert main([*common, "--out", str(first), "--stages.0.samples", "480"]) == 0
    more = ["--stages.0.samples", "128", "--stages.0.image-layers", "1", "--stages.0.text-layers"]
    assert main([*common, "--out", str(second), "--init", str(first), *more, "2"]) == 0
    return first, second


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    lines = (ROOT / "examples/clipart/captions.jsonl").read_text(encoding="utf-8").splitlines()
    for name in ("bird", "car", "flower"):
        (folder / name).mkdir()
        pairs = [json.loads(line) for line in lines if f" {name}" in line][:5]
        for pair in pairs:
            shutil.copy(ROOT / "examples/clipart" / pair["image"], folder / name)
    return folder


def test_a_sweep_chooses_a_model_and_writes_it(
    runs: tuple[Path, Path],
    small_dataset: Path,
    classes: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = runs
    out = tmp_path / "wise"
    tasks = ["--task.data", small_dataset, "--reference.images", classes]
    command = ["interpolate", second, "--out", out, *ALPHAS, *tasks]
    made = answer(capsys, *command)
    points = {p["alpha"]: p for p in made["points"]}
    assert list(points) == [0.0, 0.5, 1.0]

    def measured(model: Path) -> tuple[float, float]:
        data = ["--data", small_dataset, "--split", "dev"]
        found = answer(capsys, "eval", "retrieval", model, *data)["metrics"]["mean_recall"]
        top1 = answer(capsys, "eval", "zeroshot", model, "--images", classes)["metrics"]["top1"]
        return found, top1

    for alpha, model in ((0.0, first), (1.0, second), (made["alpha"], out)):
        point = points[alpha]
        assert (point["task"], point["reference"]) == measured(model), alpha
    assert points[0.0]["task"] != points[1.0]["task"]  # the ends can be told apart
    means = {alpha: (p["task"] + p["reference"]) / 2 for alpha, p in points.items()}
    step = 1 / 10 / 2  # of the 10 pictures in dev, fewer than in classes
    assert {p["one_picture"] for p in points.values()} == {step}
    close = [alpha for alpha, mean in means.items() if max(means.values()) - mean <= step]
    assert made["alpha"] == min(close)
    assert "within what one picture moves it by" in made["why"]
    assert any("no held-out scores" in note for note in made["notes"])
    assert not any("warning" in note for note in made["notes"])

    before = (out / "model.safetensors").stat().st_mtime_ns
    assert answer(capsys, *command) == made  # done already
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    refused = answer(capsys, *command, "--alpha", "0.2", code=2)["error"]
    assert "holds another interpolation" in refused
    assert main(["export", str(out), "--to", "open_clip", "--out", str(tmp_path / "export")]) == 0


def test_a_given_alpha_needs_no_tasks(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "middle"
    made = answer(capsys, "interpolate", runs[1], "--out", out, "--alpha", "0.25")
    assert made["points"] == made["notes"] == []
    start, end = (load_file(choose(run).weights) for run in runs)
    middle = pennyclip.load(out).model.state_dict()
    changed = 0
    for name, value in middle.items():
        if value.is_floating_point():
            expected = 0.75 * start[name].double() + 0.25 * end[name].double()
            torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=1e-5)
            changed += not torch.equal(start[name], end[name])
    assert changed > 20
    texts = pennyclip.load(out).encode_text(["a bird", "a car"])
    assert torch.allclose(texts.norm(dim=1), torch.ones(2))


def test_the_split_for_reports_is_named(runs: tuple[Path, Path], small_dataset: Path) -> None:
    def notes(task: str, reference: str) -> str:
        tasks = (Task(data=small_dataset, split=split) for split in (task, reference))
        return " ".join(held_out_notes(runs[1], *tasks))

    assert "warning" not in notes("dev", "dev")
    found = notes("val", "train")
    assert "the split 'val': if reports are made on it, they are no longer on held-out" in found
    assert "the split 'train': the run was trained on it" in found
    assert "Take --task.split dev" in found


def test_refused(
    runs: tuple[Path, Path], small_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = runs
    task = ["--task.data", small_dataset]
    for arguments, message in (
        ([second, *task], "--reference.data (a dataset) or --reference.images"),
        ([second, *task, "--task.images", tmp_path, "--reference.data", "x"], "found both"),
        ([second, "--alpha", "1.5"], "alphas in [0, 1], found 1.5"),
        ([second, *task, "--reference.data", tmp_path / "no"], "no"),
        ([first, "--alpha", "0.5"], "these began from random weights: visual.head.proj.weight"),
        ([choose(second).path, "--alpha", "0.5"], "is not a run folder"),
    ):
        out = tmp_path / "refused"
        error = answer(capsys, "interpolate", *arguments, "--out", out, code=2)["error"]
        assert message in error
        assert not out.exists()
    # With its start given, the same checkpoint does.
    alone = [choose(second).path, "--start", first, "--alpha", "0.5", "--out", tmp_path / "alone"]
    assert answer(capsys, "interpolate", *alone)["alpha"] == 0.5


def test_the_start_of_a_run_is_what_it_was_built_from(tmp_path: Path) -> None:
    small = Model(
        image=ImageTower(name="test_efficientnet", image_size=32),
        text=ClipText(width=32, layers=1, heads=1, context_length=8, vocab_size=60),
        embed_dim=16,
    )
    torch.manual_seed(0)
    published = CLIP(small)
    source = save(tmp_path / "a", 1, Scores(), published, None, {}, None, dataset="", keep=1)
    model = replace(
        small,
        image=replace(small.image, weights=str(source)),
        text=replace(small.text, weights=str(source)),
    )
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(Config(model=model, stages=(Stage(epochs=1),))))
    found = start_of(run).state_dict()
    assert found.keys() == published.state_dict().keys()
    for name, value in found.items():
        assert torch.equal(value, published.state_dict()[name]), name
    (run / "config.toml").write_text(to_toml(Config(model=small, stages=(Stage(epochs=1),))))
    with pytest.raises(RequestError, match="the image tower, the text tower"):
        start_of(run)
