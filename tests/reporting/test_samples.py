"""The page of augmented samples shows what training is given."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pennyclip.cli import main
from pennyclip.config.file import load_recipe
from pennyclip.data.index import Dataset
from pennyclip.data.loader import Loader
from pennyclip.data.text import ClipTokenizer
from pennyclip.data.tokens import TokenStore
from pennyclip.reporting.samples import write_samples

ARGUMENTS = ["samples", "scratch-vit-tiny", "--count", "5", "--epochs", "3", "--json"]


def test_pictures_and_captions_of_each_epoch(
    small_dataset: Path, wordnet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "samples.html"
    changes = ["--augment.color-jitter", "0.5", "--augment.word-dropout", "0.3"]
    changes += ["--augment.synonyms", "0.2", "--augment.wordnet", str(wordnet)]
    assert main([*ARGUMENTS, "--data", str(small_dataset), "--out", str(page), *changes]) == 0
    told = json.loads(capsys.readouterr().out)["captions"]
    text = page.read_text(encoding="utf-8")
    pictures = [
        np.array(Image.open(io.BytesIO(base64.b64decode(jpeg)))).astype(int)
        for jpeg in re.findall(r"data:image/jpeg;base64,([\w+/=]+)", text)
    ]
    assert len(pictures) == 5 * (1 + 3)
    assert text.count("<del>") > 3

    dataset, tokenizer, recipe = Dataset(small_dataset), ClipTokenizer(), load_recipe(ARGUMENTS[1])
    rows = dataset.subset("train")
    rows = rows[[0, len(rows) // 4, (len(rows) - 1) // 2, 3 * (len(rows) - 1) // 4, -1]]
    loader = Loader(
        dataset=dataset,
        rows=rows,
        tokens=TokenStore.open(dataset, tokenizer),
        tokenizer=tokenizer,
        batch_size=5,
        seed=recipe.seed,
        image_size=recipe.stages[-1].image_size or recipe.model.image.image_size,
        text_length=77,
        augment=recipe.augment,
        workers=0,
    )
    plain = loader.samples(rows[:1], np.array([1])).images
    shown = pictures[2].transpose(2, 0, 1)  # the first pair in its second epoch, colours changed
    assert shown.shape == tuple(plain.shape[1:])
    assert np.corrcoef(shown.ravel(), plain[0].numpy().ravel())[0, 1] > 0.8
    for row, captions in zip(rows.tolist(), told, strict=True):
        words = {word for caption in dataset.captions(row) for word in caption.split()}
        assert len(captions) == 3
        assert len(set(captions)) > 1 or len(words) < 4


def test_more_pairs_than_there_are_show_each_once(small_dataset: Path, tmp_path: Path) -> None:
    config = replace(load_recipe(ARGUMENTS[1]), data=str(small_dataset), subset="dev")
    captions = write_samples(config, tmp_path / "samples.html", count=1000, epochs=1)
    dataset = Dataset(small_dataset)
    rows = dataset.subset("dev").tolist()
    assert len(captions) == len(rows)
    for row, (shown,) in zip(rows, captions, strict=True):
        assert shown in dataset.captions(row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--count", "0"], r"count = 0: expected 1 or more\."),
        (["--epochs", "0"], r"epochs = 0: expected 1 or more\."),
        (["--augment.crop-scale", "1", "1"], "changes neither pictures nor captions"),
        (["--augment.synonyms", "0.1"], "set augment.wordnet"),
        (["--augment.synonyms", "0.1", "--augment.wordnet", "nowhere"], r"no index\.noun"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    changes: list[str],
    message: str,
    small_dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "samples.html"
    assert main([*ARGUMENTS, "--data", str(small_dataset), "--out", str(page), *changes]) == 2
    assert re.search(message, json.loads(capsys.readouterr().out)["error"])
    assert not page.exists()
