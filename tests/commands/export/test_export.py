"""The folder of an export: whose it is, and the card in it."""

import json
from pathlib import Path

import pytest
from small_models import checkpoint, clip_shaped

from pennyclip.base.errors import RequestError
from pennyclip.commands.export import EXPORTS, export
from pennyclip.commands.export.card import FILL, _licence
from pennyclip.config.file import to_toml, to_tree
from pennyclip.config.keys import Config, Stage
from pennyclip.training.telemetry.metrics import Metrics


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 3 updates with one evaluation, on a dataset that is gone."""
    run = tmp_path / "cats"
    model = clip_shaped()
    checkpoint(run, model)
    config = Config(model=model, stages=(Stage(epochs=1),), data=str(tmp_path / "home" / "pets"))
    (run / "config.toml").write_text(to_toml(config))
    metrics = Metrics(run / "metrics.jsonl")
    weights = {"host": "secret-machine", "threads": 2}
    metrics.log("start", 0, request=to_tree(config), machine=weights, device="cpu")
    metrics.log("train", 3, samples=768, loss=1.5)
    metrics.log("eval", 2, split="dev", metrics={"mean_recall": 0.1111})
    metrics.log("eval", 3, split="dev", metrics={"mean_recall": 0.4321})
    metrics.log("eval", 3, split="val", metrics={"mean_recall": 0.5678}, checkpoint="best")
    metrics.log("end", 3, reason="finished")
    metrics.close()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in lines:  # a run of 75 seconds
        record["time"] = f"2026-01-01T00:0{1 if record['kind'] == 'end' else 0}:00.000+00:00"
    lines[-1]["time"] = "2026-01-01T00:01:15.000+00:00"
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_the_card_says_what_the_model_is(run: Path, tmp_path: Path) -> None:
    done = export(run, "open_clip", tmp_path / "out")
    card = (done.path / "README.md").read_text()
    assert card.startswith("---\nlicense: TO FILL\n")
    assert "# cats" in card
    assert "local-dir:.'" in card
    assert str(tmp_path) in done.load_line
    assert "| image tower | `vit_femto_patch16_clip_64` | random weights |" in card
    assert "- `pets`, subset `train`" in card
    assert "| dev | mean_recall | 0.4321 |" in card
    assert "| val | mean_recall | 0.5678 |" in card
    assert "0.1111" not in card  # of another checkpoint
    assert "- 75 seconds (1 min 15 s) for the whole run" in card
    assert "- 768 samples" in card
    assert "| batch_size | 256 |" in card
    assert "| optim.lr | " in card
    assert "loss_scaling" not in card  # as it always is
    assert not any(note.startswith("warning") for note in done.notes)
    assert "- Licence of this model: TO FILL" in card
    # Nothing about the machine that others need not know.
    assert "secret-machine" not in card
    for file in ("README.md", "export.json"):
        assert str(tmp_path) not in (done.path / file).read_text()


def test_a_stopped_or_unmeasured_model_says_so(run: Path, tmp_path: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = "".join(x for x in lines if '"eval"' not in x)
    (run / "metrics.jsonl").write_text(kept.replace("finished", "signal SIGTERM"))
    done = export(run, "open_clip", tmp_path / "out")
    first, second = done.notes[:2]
    assert first == "warning: the run is not finished: stopped at step 3: signal SIGTERM"
    assert second.startswith("warning: the checkpoint of step 3 was never evaluated")
    assert f"- {first}\n- {second}" in (done.path / "README.md").read_text()


def test_the_licence_of_weights_is_what_their_package_states() -> None:
    assert _licence("package:all-minilm-l6-v2").startswith("MIT (")
    assert _licence("package:efficientnet-lite0") == FILL  # it states UNKNOWN
    assert _licence("hub:some/model") == FILL


def test_a_lone_checkpoint_has_a_card_too(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "run", clip_shaped())
    done = export(path, "open_clip", tmp_path / "out")
    card = (done.path / "README.md").read_text()
    assert "Not measured at this checkpoint." in card
    assert "## Cost\n\nNot recorded." in card


def test_the_same_export_again_is_left_as_it_is(run: Path, tmp_path: Path) -> None:
    first = export(run, "open_clip", tmp_path / "out")
    card = first.path / "README.md"
    card.write_text("filled in by hand")
    assert export(run, "open_clip", tmp_path / "out") == first
    assert card.read_text() == "filled in by hand"


def test_a_folder_with_something_else_is_refused(run: Path, tmp_path: Path) -> None:
    export(run, "open_clip", tmp_path / "out")
    with pytest.raises(RequestError, match="holds another export"):
        export(run, "hf", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(RequestError, match="no export of pennyclip"):
        export(run, "open_clip", tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_unknown_formats_and_checkpoints_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="expected open_clip, hf, onnx"):
        export(run, "tensorrt", tmp_path / "out")
    with pytest.raises(RequestError, match="no checkpoint '9'"):
        export(run, "onnx", tmp_path / "out", checkpoint="9")
    assert list(EXPORTS) == ["open_clip", "hf", "onnx"]
