"""A run with adapters in MiniLM beside a frozen EfficientNet.

It learns, resumes exactly, and leaves checkpoints that need no peft.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import pennyclip
from pennyclip.cli import main
from pennyclip.data.index import Dataset
from pennyclip.data.tokens import TokenStore
from pennyclip.evaluation.features import embed_rows
from pennyclip.model.lora import is_adapter
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.weights.checkpoint import checkpoints, choose, load_trainer

STEPS = 16
COMMON = [
    "--stages.0.epochs", "None",
    "--stages.0.samples", str(16 * STEPS),
    "--batch-size", "16",
    "--log-every", "1",
    "--evaluate.every-epochs", "4",
]  # fmt: skip
LORA = [
    "--seed", "1",
    "--lora.text.rank", "8",
    "--stages.0.text-layers", "all",
    "--stages.0.text-length", "24",
    "--optim.text.lr", "1e-3",
    "--optim.heads.lr", "1e-6",
    "--checkpoint.every-steps", "8",
    "--checkpoint.keep", "9",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Heads alone, and from there adapters, the heads hardly moving."""
    folder = tmp_path_factory.mktemp("lora")
    heads, adapters = folder / "heads", folder / "adapters"
    train = ["train", "frozen-lite0-minilm", "--data", str(small_dataset), *COMMON]
    assert main([*train, "--out", str(heads)]) == 0
    assert main([*train, "--out", str(adapters), "--init", str(heads), *LORA]) == 0
    return heads, adapters


@pytest.fixture
def run(runs: tuple[Path, Path]) -> Path:
    return runs[1]


def losses(run: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]


@torch.no_grad()
def train_loss(run: Path, data: Path) -> float:
    """InfoNCE over all training rows with their first captions, nothing dropped."""
    encoder, dataset = pennyclip.load(run, "last"), Dataset(data)
    tokens = TokenStore.open(dataset, encoder.tokenizer)
    found = embed_rows(encoder.model, dataset, tokens, dataset.subset("train"), 32)
    first = torch.searchsorted(found.owner, torch.arange(len(found.image)))
    logits = found.image @ found.text[first].T / 0.07
    own = torch.arange(len(logits))
    return float(F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def test_adapters_lower_the_loss(runs: tuple[Path, Path], small_dataset: Path) -> None:
    before, after = (train_loss(run, small_dataset) for run in runs)
    assert after < 0.9 * before


def test_only_adapters_and_heads_changed(runs: tuple[Path, Path]) -> None:
    before = load_file(choose(runs[0]).weights)
    last = checkpoints(runs[1])[-1]
    merged, kept = load_file(last.weights), load_trainer(last)["adapters"]
    assert merged.keys() == before.keys()
    under = {n.replace(".base_layer", ""): v for n, v in kept.items() if not is_adapter(n)}
    assert len(under) == 6 * 6
    assert len(kept) == 3 * 6 * 6
    for name, value in under.items():
        assert torch.equal(value, before[name]), name
    changed = {name for name in before if not torch.equal(merged[name], before[name])}
    heads = {n for n in before if n.startswith(("visual.head.", "text.proj.", "logit_"))}
    assert changed == heads | under.keys()


def test_a_checkpoint_needs_no_peft(
    run: Path, small_dataset: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "peft", None)
    chosen = pennyclip.load(run).checkpoint
    arguments = ["eval", "retrieval", str(run), "--data", str(small_dataset), "--split", "dev"]
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]["mean_recall"]
    assert found == pytest.approx(chosen.score, abs=1e-6)
    assert main(["export", str(run), "--to", "open_clip", "--out", str(run / "exported")]) == 0
    exported = load_file(run / "exported/model.safetensors")
    assert exported.keys() == load_file(chosen.path / "model.safetensors").keys()


def test_a_resumed_run_equals_the_unbroken_one(run: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(run, half)
    for checkpoint in checkpoints(half):
        if checkpoint.step > 8:
            shutil.rmtree(checkpoint.path)
    assert checkpoints(half)[-1].step == 8
    assert main(["train", "--resume", str(half)]) == 0
    assert losses(half) == losses(run)
    one, other = (checkpoints(folder)[-1] for folder in (run, half))
    assert one.step == other.step == STEPS
    first, second = (load_file(c.path / "model.safetensors") for c in (one, other))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    first, second = (load_trainer(c)["adapters"] for c in (one, other))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_adapters_that_could_not_learn_are_refused(
    small_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ["--data", str(small_dataset), "--out", str(tmp_path / "out"), "--batch-size", "16"]
    for recipe, tower, message in (
        ("frozen-lite0-minilm", "text", "the text trunk is frozen in every stage, adapters too"),
        ("frozen-lite0-minilm", "image", "has no linear layers"),
        ("scratch-vit-tiny", "image", "the image trunk starts from random weights"),
    ):
        assert main(["train", recipe, *to, f"--lora.{tower}.rank", "4"]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
