"""What becomes of a picture: its size and shape, raw pixels, colours, limits, roots."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_sources import contents, picture, run, write_table
from torchvision.transforms import v2

from pennyclip.base.errors import RequestError
from pennyclip.data.images import decode_jpeg
from pennyclip.data.index import Dataset
from pennyclip.data.loader import load_images

pytestmark = pytest.mark.usefixtures("in_process")


def folder_of(folder: Path, images: dict[str, Image.Image], **options: object) -> Path:
    folder.mkdir(parents=True)
    for name, image in images.items():
        image.save(folder / name, **options)
        (folder / name).with_suffix(".txt").write_text(f"called {name}")
    return folder


def stored(out: Path) -> dict[str, np.ndarray]:
    dataset = Dataset(out)
    entries = dataset.keys(np.arange(len(dataset)))
    return {
        entry["source_key"]: decode_jpeg(dataset.image_bytes(row))
        for row, entry in enumerate(entries)
    }


@pytest.mark.parametrize(
    ("fit", "wide", "small"),
    [
        ("shortest", (64, 128, 3), (30, 50, 3)),
        ("crop", (64, 64, 3), (30, 30, 3)),
        ("pad", (64, 64, 3), (50, 50, 3)),
    ],
)
def test_fit(tmp_path: Path, fit: str, wide: tuple[int, ...], small: tuple[int, ...]) -> None:
    red = Image.new("RGB", (400, 200), (200, 0, 0))
    red.paste((0, 0, 200), (0, 0, 100, 200))  # the left quarter is blue
    pictures = {"wide.png": red, "small.png": picture(1, (50, 30))}
    run(folder_of(tmp_path / "in", pictures), out=tmp_path / "out", fit=fit, side=64)
    found = stored(tmp_path / "out")
    assert found["wide.png"].shape == wide
    assert found["small.png"].shape == small
    middle = wide[0] // 2
    corner, left = found["wide.png"][2, 2].astype(int), found["wide.png"][middle, 2].astype(int)
    is_blue, is_white = np.array([0, 0, 200]), np.array([255, 255, 255])
    if fit == "pad":
        assert np.abs(corner - is_white).max() < 12
    if fit == "crop":  # the square in the middle begins where blue ends
        assert np.abs(found["wide.png"][middle, 10].astype(int) - (200, 0, 0)).max() < 12
    else:
        assert np.abs(left - is_blue).max() < 12


def test_a_square_that_fits_keeps_its_data_whatever_the_fit(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", {"a.jpg": picture(3, (48, 48))}, quality=95)
    whole = decode_jpeg((source / "a.jpg").read_bytes())
    for fit in ("shortest", "crop", "pad"):
        run(source, out=tmp_path / fit, fit=fit, side=64)
        assert (stored(tmp_path / fit)["a.jpg"] == whole).all()


def test_raw_squares_are_clip_s_preprocessing_of_the_originals(
    shared: Path, tmp_path: Path
) -> None:
    """Against torchvision on Pillow images, as CLIP and open_clip do it; no JPEG in between."""
    names = sorted((shared / "data/openstax-pairs/images").iterdir())[:40:8]
    pictures = {f"{i}.png": Image.open(name).convert("RGB") for i, name in enumerate(names)}
    pictures["tiny.png"] = picture(1, (20, 90))
    out = tmp_path / "out"
    summary = run(folder_of(tmp_path / "in", pictures), out=out, raw=112, shard_size=4)
    assert summary.raw_bytes == 6 * 112 * 112 * 3 + 2 * 128
    preprocess = v2.Compose(
        [
            v2.Resize(112, interpolation=v2.InterpolationMode.BICUBIC),
            v2.CenterCrop(112),
            v2.PILToTensor(),
        ]
    )
    dataset = Dataset(out)
    images = load_images(dataset, np.arange(6), 112)
    for row, entry in enumerate(dataset.keys(np.arange(6))):
        expected = preprocess(pictures[entry["source_key"]])
        error = (images[row].int() - expected.int()).abs().double()
        assert error.mean() < 0.05, entry["source_key"]
        assert error.max() <= 2
        raw = torch.from_numpy(dataset.pixels(row, 112)).permute(2, 0, 1)
        assert torch.equal(images[row], raw)
    larger = dataset.pixels(0, 113)  # more than was kept: from the JPEG
    assert larger.shape == decode_jpeg(dataset.image_bytes(0)).shape
    assert load_images(dataset, np.arange(6), 64).shape == (6, 3, 64, 64)


def test_raw_squares_of_padded_pictures_show_all_of_them(tmp_path: Path) -> None:
    red = Image.new("RGB", (400, 200), (200, 0, 0))
    run(folder_of(tmp_path / "in", {"a.png": red}), out=tmp_path / "out", fit="pad", raw=40)
    square = Dataset(tmp_path / "out").pixels(0, 40)
    assert square.shape == (40, 40, 3)
    assert (square[:8] == 255).all()
    assert (square[12:28] == (200, 0, 0)).all()


def test_a_raw_file_that_was_lost_is_made_again(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 9)
    run(table, out=tmp_path / "out", shard_size=3, raw=32)
    whole = contents(tmp_path / "out")
    for name in ("dataset.json", "raw/000001.npy"):
        (tmp_path / "out" / name).unlink()
    run(table, out=tmp_path / "out", shard_size=3, raw=32)
    assert contents(tmp_path / "out") == whole


def test_max_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = {"small.png": picture(1, (100, 100)), "large.png": picture(2, (101, 100))}
    source = folder_of(tmp_path / "in", pictures)
    summary = run(source, out=tmp_path / "out", max_pixels=10_000)
    assert (summary.kept, summary.rejected) == (1, {"too large": 1})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow's own limit gives way
    assert run(source, out=tmp_path / "more", max_pixels=10_100).kept == 2


def test_wrong_forms_are_refused(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", {"a.png": picture(1)})
    for options, part in (
        ({"fit": "stretch"}, "fit = stretch: expected one of shortest, crop, pad"),
        ({"raw": 4}, "raw = 4"),
        ({"max_pixels": 0}, "max_pixels = 0"),
        ({"side": 70_000}, "side = 70000"),
    ):
        with pytest.raises(RequestError, match=part):
            run(source, out=tmp_path / "out", **options)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.tex").write_text("dear")
    with pytest.raises(RequestError, match=r"thesis\.tex\)\. Give an empty .* --roots"):
        run(source, out=tmp_path / "out", roots=[taken])
    assert not (tmp_path / "out").exists()


def test_a_replaced_picture_is_noticed_although_its_table_is_the_same(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 4)
    run(table, out=tmp_path / "out")
    picture(99, (64, 48)).save(tmp_path / "in" / "2.jpg")
    with pytest.raises(RequestError, match=r"captions\.jsonl has changed: a table, or its files"):
        run(table, out=tmp_path / "out")


def test_class_folders_can_be_split_and_are_no_negatives(tmp_path: Path) -> None:
    for i in range(60):
        folder = tmp_path / "in" / ("red_fruit" if i % 2 else "chair")
        folder.mkdir(parents=True, exist_ok=True)
        picture(i // 3 if i < 6 else i).save(folder / f"{i}.png")
    options = {"templates": ("a photo of a {}", "{}"), "val_share": 0.1, "dev_share": 0.1}
    summary = run(tmp_path / "in", out=tmp_path / "out", **options)
    dataset = Dataset(tmp_path / "out")
    assert summary.kept == 60
    assert summary.groups == 2  # although pictures 0 to 2 and 3 to 5 are in both classes
    assert summary.splits["val"] == 6
    parts = [set(dataset.subset(name).tolist()) for name in ("train", "val", "dev")]
    same = dataset.keys(np.arange(60))
    hashes = [{same[row]["pixel_hash"] for row in part} for part in parts]
    assert len(hashes[0] | hashes[1] | hashes[2]) == sum(map(len, hashes)) == 56
    assert dataset.captions(0) == ["a photo of a chair", "chair"]


def test_two_classes_are_two_groups(tmp_path: Path) -> None:
    for i in range(8):
        folder = tmp_path / "in" / f"class-{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        picture(i).save(folder / f"{i}.png")
    run(tmp_path / "in", out=tmp_path / "out", templates=["a {}"])
    assert Dataset(tmp_path / "out").rows["group"].tolist() == [0] * 4 + [4] * 4


def test_the_summary_has_a_line_a_source(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 5)
    (tmp_path / "in" / "3.jpg").write_bytes(b"")
    source = folder_of(tmp_path / "more", {"a.png": picture(50)})
    text = str(run(table, source, out=tmp_path / "out"))
    lines = [line.split() for line in text.splitlines()]
    assert ["source", "kind", "inputs", "kept", "refused"] in lines
    assert ["captions.jsonl", "table", "5", "4", "1"] in lines
    assert ["more", "folder", "1", "1", "0"] in lines
    meta = json.loads((tmp_path / "out/dataset.json").read_text())
    assert [one["rows"] for one in meta["sources"]] == [[0, 4], [4, 5]]


def test_animation_palette_and_cmyk_pass_through_the_raw_tier(tmp_path: Path) -> None:
    red = Image.new("RGB", (40, 40), (200, 30, 40))
    buffer = io.BytesIO()
    red.convert("CMYK").save(buffer, "JPEG", quality=95)
    pictures = {"a.gif": red.quantize(4), "b.jpg": red.convert("CMYK")}
    run(folder_of(tmp_path / "in", pictures), out=tmp_path / "out", raw=32)
    dataset = Dataset(tmp_path / "out")
    for row in range(2):
        assert np.abs(dataset.pixels(row, 32).astype(int) - (200, 30, 40)).max() <= 12
