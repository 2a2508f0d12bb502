"""Zero-shot classification with an encoder whose answers are known."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from pennyclip.base.errors import RequestError, RunError
from pennyclip.evaluation.zeroshot import read_names, zeroshot

COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "deep blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "cyan": (0, 255, 255),
    "magenta": (255, 0, 255),
}


def embed(colours: Sequence[Sequence[float]]) -> Tensor:
    return F.normalize(torch.tensor(colours, dtype=torch.float32) - 127.0, dim=1)


class ColourModel:
    """Knows the mean colour of a picture, and the colour whose name a text holds."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode_image(self, images: Sequence[Image.Image]) -> Tensor:
        assert all(image.mode == "RGB" for image in images)
        return embed([image.resize((1, 1)).getpixel((0, 0)) for image in images])  # type: ignore[misc]

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        self.texts += texts
        return embed([next(c for name, c in COLOURS.items() if name in text) for text in texts])


def paint(folder: Path, colours: Sequence[str], extension: str = "png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, colour in enumerate(colours):
        Image.new("RGB", (12, 8), COLOURS[colour]).save(folder / f"{number}.{extension}")


@pytest.fixture
def six(tmp_path: Path) -> Path:
    """Six classes of two right pictures each, and a third in `red` that is magenta."""
    for name in COLOURS:
        paint(tmp_path / name.replace(" ", "_"), [name, name])
    paint(tmp_path / "red", ["red", "red", "magenta"])
    return tmp_path


def test_known_answers(six: Path) -> None:
    model = ColourModel()
    result = zeroshot(model, six, templates=["{}", "a photo of {}"], chunk=4)
    assert result.metrics == pytest.approx(
        {
            "top1": 12 / 13,
            "top5": 1.0,
            "mean_per_class": (5 + 2 / 3) / 6,
            "images": 13,
            "unreadable": 0,
            "classes": 6,
        }
    )
    assert result.tables["classes"][2] == {
        "class": "green",
        "folder": "green",
        "images": 2,
        "top1": 1.0,
    }
    assert result.tables["classes"][-2]["top1"] == pytest.approx(2 / 3)
    assert result.tables["confusions"] == [
        {"class": "red", "taken_for": "magenta", "images": 1, "share": pytest.approx(1 / 3)}
    ]
    assert model.texts[:4] == ["cyan", "a photo of cyan", "deep blue", "a photo of deep blue"]
    assert zeroshot(model, six).metrics["top1"] == pytest.approx(12 / 13)
    json.dumps(result.tables)


def test_top5_misses_the_last_of_six(tmp_path: Path) -> None:
    """Cyan is what is least like red, so a cyan picture in `red` ranks its class sixth."""
    for name in COLOURS:
        paint(tmp_path / name, [name])
    paint(tmp_path / "red", ["cyan"])
    result = zeroshot(ColourModel(), tmp_path)
    assert result.metrics["top1"] == result.metrics["top5"] == pytest.approx(5 / 6)
    assert result.chance == {"top1": 1 / 6, "top5": 5 / 6, "mean_per_class": 1 / 6}


def test_few_classes_have_no_top5(tmp_path: Path) -> None:
    paint(tmp_path / "red", ["red"])
    paint(tmp_path / "green", ["green", "red", "red"], "jpg")
    metrics = zeroshot(ColourModel(), tmp_path).metrics
    assert "top5" not in metrics
    assert metrics["top1"] == 0.5
    assert metrics["mean_per_class"] == pytest.approx((1 + 1 / 3) / 2)


def test_several_templates_are_averaged_after_normalising(tmp_path: Path) -> None:
    paint(tmp_path / "red", ["red"])
    paint(tmp_path / "green", ["green"])

    class Askew(ColourModel):
        def encode_text(self, texts: Sequence[str]) -> Tensor:
            vectors = {"1 red": (1, 0, 0), "2 red": (0, 0, 1), "1 green": (0, 1, 0)}
            vectors["2 green"] = (0.6, 0, 0.8)
            return torch.tensor([vectors[text] for text in texts], dtype=torch.float32)

        def encode_image(self, images: Sequence[Image.Image]) -> Tensor:
            return F.normalize(torch.tensor([[0.5, 0.5, 1.0]] * len(images)), dim=1)

    # By the mean of templates red scores 0.75 sqrt 2 = 1.06 and green 1.60 / 1.26 = 1.27 (before
    # the picture's norm): green for both. By the first template alone they would tie.
    result = zeroshot(Askew(), tmp_path, templates=["1 {}", "2 {}"])
    assert [row["top1"] for row in result.tables["classes"]] == [1.0, 0.0]
    assert zeroshot(Askew(), tmp_path, templates=["1 {}"]).metrics["top1"] == 0.0


def test_a_model_that_tells_nothing_apart_scores_nothing(six: Path) -> None:
    class Constant(ColourModel):
        def encode_text(self, texts: Sequence[str]) -> Tensor:
            return embed([[0, 0, 255]] * len(texts))

    metrics = zeroshot(Constant(), six).metrics
    assert metrics["top1"] == 0.0
    assert metrics["top5"] == 1.0  # every class has the mean rank 3.5


def test_unreadable_pictures_are_counted_and_named(six: Path) -> None:
    (six / "red" / "notes.txt").write_text("not a picture")
    whole = (six / "green" / "0.png").read_bytes()
    (six / "green" / "0.png").write_bytes(whole[: len(whole) // 2])
    (six / "green" / ".hidden").write_text("ignored")
    result = zeroshot(ColourModel(), six)
    assert result.metrics["unreadable"] == 2
    assert result.metrics["images"] == 12
    assert [row["file"] for row in result.tables["unreadable"]] == ["green/0.png", "red/notes.txt"]
    assert all(row["reason"] for row in result.tables["unreadable"])


def test_a_class_without_a_readable_picture_has_no_accuracy(six: Path) -> None:
    for file in (six / "cyan").iterdir():
        file.write_bytes(b"")
    result = zeroshot(ColourModel(), six)
    assert result.tables["classes"][0] == {
        "class": "cyan",
        "folder": "cyan",
        "images": 0,
        "top1": None,
    }
    assert result.metrics["mean_per_class"] == pytest.approx((4 + 2 / 3) / 5)


@pytest.mark.parametrize("side", ["image", "text"])
def test_features_that_are_not_finite(six: Path, side: str) -> None:
    class Diverged(ColourModel):
        def encode_image(self, images: Sequence[Image.Image]) -> Tensor:
            return super().encode_image(images) * (torch.nan if side == "image" else 1)

        def encode_text(self, texts: Sequence[str]) -> Tensor:
            return super().encode_text(texts) * (torch.nan if side == "text" else 1)

    with pytest.raises(RunError, match=f"of the {side} features"):
        zeroshot(Diverged(), six)


def test_folders_by_other_names(tmp_path: Path) -> None:
    paint(tmp_path / "n01", ["red"])
    paint(tmp_path / "green", ["green"])
    names = tmp_path / "names.json"
    names.write_text('{"n01": "red"}')
    result = zeroshot(ColourModel(), tmp_path, read_names(names))
    assert result.metrics["top1"] == 1.0
    assert [row["class"] for row in result.tables["classes"]] == ["green", "red"]
    with pytest.raises(RequestError, match=r"no folder 'gren'. Did you mean 'green'\?"):
        zeroshot(ColourModel(), tmp_path, {"gren": "red"})
    with pytest.raises(RequestError, match=r"'green' and 'n01' .* both mean the class 'Green'"):
        zeroshot(ColourModel(), tmp_path, {"n01": "Green"})
    names.write_text('["red"]')
    with pytest.raises(RequestError, match="expected one JSON object"):
        read_names(names)
    with pytest.raises(RequestError, match="can't be read as JSON"):
        read_names(tmp_path / "absent.json")


def test_requests_without_an_answer(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"at least two class folders .* found 0"):
        zeroshot(ColourModel(), tmp_path / "absent")
    paint(tmp_path / "red", ["red"])
    with pytest.raises(RequestError, match=r"at least two class folders .* found 1: red"):
        zeroshot(ColourModel(), tmp_path)
    (tmp_path / "green").mkdir()
    with pytest.raises(RequestError, match="green is empty"):
        zeroshot(ColourModel(), tmp_path)
    for name in ("red/0.png", "green/0.png"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(RequestError, match=r"none of the 2 files .* green/0.png: empty file"):
        zeroshot(ColourModel(), tmp_path)
