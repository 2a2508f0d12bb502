import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pennyclip.data.duplicates import Links, near_pairs, row_groups
from pennyclip.data.hashes import fine_hash, phash, pixel_hash
from pennyclip.data.prepare import prepare
from pennyclip.data.resize import resize_short_side

CLIPART = Path(__file__).resolve().parents[2] / "examples/clipart"


def brute_force(hashes: np.ndarray, distance: int) -> set[tuple[int, int]]:
    return {
        (i, j)
        for i in range(len(hashes))
        for j in range(i + 1, len(hashes))
        if (int(hashes[i]) ^ int(hashes[j])).bit_count() <= distance
    }


@pytest.mark.parametrize("distance", [0, 3, 4, 6, 8])
def test_every_near_pair_is_found_and_no_other(distance: int) -> None:
    generator = np.random.default_rng(distance)
    hashes = generator.integers(0, 2**64, 60, np.uint64)
    flips = [np.uint64(sum(1 << int(b) for b in generator.choice(64, n, False))) for n in range(12)]
    hashes = np.concatenate([hashes, *(hashes[:9] ^ flip for flip in flips)])
    found: set[tuple[int, int]] = set()
    for a, b in near_pairs(hashes, distance):
        found |= set(zip(a.tolist(), b.tolist(), strict=True))
    assert found == brute_force(hashes, distance)
    assert len(found) >= 9 * (distance + 1)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=30))
def test_links_are_connected_components(edges: list[tuple[int, int]]) -> None:
    links = Links(15)
    for part in (edges[::2], edges[1::2]):
        a, b = (np.array([edge[side] for edge in part], np.int64) for side in (0, 1))
        links.join(a, b)
    expected = list(range(15))  # smallest node reachable, by brute force
    for _ in range(15):
        for a, b in edges:
            expected[a] = expected[b] = min(expected[a], expected[b])
    assert links.roots.tolist() == expected


def table(pictures: list[np.ndarray], captions: list[list[str]] | None = None) -> pa.Table:
    count = len(pictures)
    return pa.table(
        {
            "pixel_hash": pa.array([pixel_hash(p) for p in pictures], pa.binary(16)),
            "phash": pa.array([phash(p) for p in pictures], pa.uint64()),
            "fine_hash": pa.array([fine_hash(p) for p in pictures], pa.binary(32)),
            "captions": captions or [[f"number {i}"] for i in range(count)],
            "source": [0] * count,
            "group": pa.array([None] * count, pa.string()),
            "label": pa.array([None] * count, pa.string()),
        }
    )


def photograph(seed: int, size: tuple[int, int] = (128, 96)) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def saved(image: Image.Image, quality: int) -> np.ndarray:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return np.array(Image.open(file))


def test_copies_saved_again_are_one_picture_and_others_are_not() -> None:
    pictures = [np.array(photograph(seed)) for seed in range(40)]
    copies = [saved(photograph(0, (64, 48)), 60), saved(photograph(7), 30), pictures[3].copy()]
    groups, same = row_groups(table(pictures + copies))
    assert same.tolist() == [*range(40), 0, 7, 3]
    assert groups.tolist() == same.tolist()
    _, exact = row_groups(table(pictures + copies), near_bits=0)
    assert exact.tolist() == [*range(42), 3]


def test_captions_join_groups_but_not_pictures() -> None:
    pictures = [np.array(photograph(seed)) for seed in range(3)]
    groups, same = row_groups(table(pictures, [["a dog"], ["b", " A  Dog"], ["c"]]))
    assert same.tolist() == [0, 1, 2]
    assert groups.tolist() == [0, 0, 2]


def test_flat_pictures_are_not_taken_for_each_other() -> None:
    flat = [np.full((64, 64, 3), value, np.uint8) for value in (0, 128, 255, 255)]
    stripes = []
    for top in (40, 90):  # flags: hardly any frequency, and the same ones
        stripes.append(np.full((60, 64, 3), 200, np.uint8))
        stripes[-1][:20] = top
    assert phash(stripes[0]) == phash(stripes[1])
    _, same = row_groups(table([*flat, *stripes]))
    assert same.tolist() == [0, 1, 2, 2, 4, 5]


def drawing(name: str) -> np.ndarray:
    image = Image.open(CLIPART / name).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return np.array(Image.alpha_composite(white, image).convert("RGB"))


def test_two_signs_in_one_frame_differ_and_one_drawing_in_two_colours_does_not() -> None:
    lines = (CLIPART / "captions.jsonl").read_text(encoding="utf-8").splitlines()
    names = [json.loads(lines[i])["image"] for i in (1471, 1530, 520, 521)]
    pictures = [resize_short_side(drawing(name), 256) for name in names]
    hashes = [phash(picture) for picture in pictures]
    assert (hashes[0] ^ hashes[1]).bit_count() <= 8  # the red triangle
    assert (hashes[2] ^ hashes[3]).bit_count() <= 6  # an ice cream
    _, same = row_groups(table(pictures), near_bits=8)
    assert same.tolist() == [0, 1, 2, 2]


def test_a_near_copy_of_a_held_out_picture_is_not_trained_on(tmp_path: Path) -> None:
    lines = []
    for seed in range(6):
        photograph(seed).save(tmp_path / f"{seed}.png")
        split = "val" if seed < 2 else "train"
        lines.append({"image": f"{seed}.png", "caption": f"number {seed}", "split": split})
    photograph(0, (64, 48)).save(tmp_path / "again.jpg", quality=60)
    lines.append({"image": "again.jpg", "caption": "another name", "split": "train"})
    table = tmp_path / "captions.jsonl"
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for near_bits, kept, crossing in ((6, 4, 1), (0, 5, 0)):
        out = tmp_path / f"out-{near_bits}"
        summary = prepare([table], out, near_bits=near_bits, workers=1, dev_share=0, quiet=True)
        assert summary.splits == {"train": kept, "val": 2}
        assert (summary.crossing, summary.near_pictures) == (crossing, crossing)
    assert "0 pictures equal, 1 nearly" in str(
        prepare([table], tmp_path / "out-6", workers=1, dev_share=0, quiet=True)
    )
