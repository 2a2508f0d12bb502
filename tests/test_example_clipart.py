"""The example data set is complete, small, clean, and its two sides don't share captions."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

FOLDER = Path(__file__).parents[1] / "examples" / "clipart"
Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    text = (FOLDER / "captions.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_folder_is_below_12_mb() -> None:
    assert sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file()) < 12_000_000


def test_split_has_400_validation_rows(rows: list[Row]) -> None:
    assert {row["split"] for row in rows} == {"train", "val"}
    assert sum(row["split"] == "val" for row in rows) == 400
    assert 1500 <= len(rows) <= 2000


def test_each_image_is_listed_once_and_none_is_left_over(rows: list[Row]) -> None:
    listed = sorted(str(row["image"]) for row in rows)
    on_disk = sorted(f"images/{f.name}" for f in (FOLDER / "images").iterdir())
    assert listed == on_disk


def test_every_image_opens_within_256_px(rows: list[Row]) -> None:
    for row in rows:
        with Image.open(FOLDER / str(row["image"])) as image:
            image.load()
            assert max(image.size) <= 256, row["image"]


def captions(rows: list[Row], split: str) -> list[str]:
    return [str(c) for row in rows if row["split"] == split for c in row["captions"]]


def test_captions_are_clean(rows: list[Row]) -> None:
    for caption in captions(rows, "train") + captions(rows, "val"):
        assert caption.strip()
        assert "hash(" not in caption.lower()
        assert "\n" not in caption
        assert "&amp;" not in caption
        assert "@" not in caption
    assert all(len(row["captions"]) == 1 for row in rows)


def test_no_caption_is_on_both_sides(rows: list[Row]) -> None:
    train = {caption.lower() for caption in captions(rows, "train")}
    assert train.isdisjoint(caption.lower() for caption in captions(rows, "val"))


def test_source_names_no_place_of_this_machine() -> None:
    for name in ("SOURCE.md", "select_pictures.py", "select_pictures.toml", "captions.jsonl"):
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert "/tmp/" not in text, name
        assert str(FOLDER.parents[1]) not in text, name
        assert "/home/" not in text, name
