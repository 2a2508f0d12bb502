"""A run whose dataset has moved or has grown says what to do; and what equal captions cost it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pennyclip.base.errors import RequestError
from pennyclip.cli import main
from pennyclip.commands.doctor.replay import replay
from pennyclip.config.keys import Checkpointing
from pennyclip.data.index import Dataset
from pennyclip.data.prepare import prepare
from pennyclip.evaluation.retrieval import ceiling
from pennyclip.training.loop import resume, train
from pennyclip.weights.checkpoint import checkpoints
from small_runs import small_run


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, small_dataset: Path) -> Path:
    """Class folders, of two classes: 60 pictures that differ."""
    folder, dataset = tmp_path_factory.mktemp("classes"), Dataset(small_dataset)
    for row in range(60):
        target = folder / ("cats", "dogs")[row % 2] / f"{row}.jpg"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(dataset.image_bytes(row))
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, small_dataset: Path) -> tuple[Path, Path]:
    """A dataset, and a run on it that stands at update 2 of 4."""
    folder = tmp_path_factory.mktemp("runs")
    data = Path(shutil.copytree(small_dataset, folder / "data"))
    config = small_run(data)
    config = replace(config, checkpoint=Checkpointing(every_steps=2))
    train(config, folder / "run", quiet=True)
    *_, last = checkpoints(folder / "run")
    assert last.step == 4
    shutil.rmtree(last.path)
    return data, folder / "run"


def test_a_dataset_that_moved_is_set_in_the_config(
    stopped: tuple[Path, Path], tmp_path: Path
) -> None:
    data, run = (Path(shutil.copytree(one, tmp_path / one.name)) for one in stopped)
    config = run / "config.toml"
    text = config.read_text().replace(str(stopped[0]), str(data))
    config.write_text(text)
    data.rename(tmp_path / "moved")
    told = rf"{re.escape(str(data))}, is not there.*set `data` in {re.escape(str(config))} to its"
    for command in (resume, lambda folder: replay(folder, 2)):
        with pytest.raises(RequestError, match=told):
            command(run)
    config.write_text(text.replace(str(data), str(tmp_path / "moved")))
    assert "batch 2" in replay(run, 2).text
    assert resume(run, quiet=True).finished


def test_a_dataset_that_grew_is_another(
    stopped: tuple[Path, Path], pictures: Path, tmp_path: Path
) -> None:
    data, run = (Path(shutil.copytree(one, tmp_path / one.name)) for one in stopped)
    config = run / "config.toml"
    config.write_text(config.read_text().replace(str(stopped[0]), str(data)))
    prepare([pictures], data, dev_share=0.1, templates=["{}"], append=True, workers=1, quiet=True)
    with pytest.raises(RequestError, match="since then it was prepared anew, or appended to"):
        resume(run, quiet=True)


def test_the_ceiling_of_equal_captions_is_told(
    stopped: tuple[Path, Path],
    pictures: Path,
    small_dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "data"
    prepare([pictures], data, templates=["a {}", "{}"], val_share=0.4, workers=1, quiet=True)
    dataset = Dataset(data)
    texts = [dataset.captions(row) for row in dataset.subset("val").tolist()]
    owner = [row for row, own in enumerate(texts) for _ in own]
    shared, most = ceiling(owner, [text for own in texts for text in own])
    assert shared == len(texts) > 10
    argv = ["eval", "retrieval", str(stopped[1]), "--data", str(data)]
    assert main([*argv, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ceiling"] == pytest.approx(most)
    assert answer["metrics"]["image_to_text/R@1"] == most["image_to_text/R@1"] == 0
    (note,) = answer["notes"]
    assert f"{shared} of {shared} images share a caption with others" in note
    right = f"text-to-image R@1 {most['text_to_image/R@1']:.1%}, R@5"
    assert right in note
    assert main(argv) == 0
    assert note in capsys.readouterr().out
    assert main([*argv[:-1], str(small_dataset), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ceiling"], answer["notes"]) == ({}, [])
