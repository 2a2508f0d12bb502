"""Our preprocessing beside open_clip's: torch on uint8 here, Pillow there, the same within bounds.

The bounds are those of README.md and docs/design.md. The pictures have many shapes, their shorter
side is 66 to 221 pixels; both sides begin with the same pixels.
"""

from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from pennyclip.config.keys import ClipText, ImageTower, Model
from pennyclip.data import resize
from pennyclip.data.resize import LONGEST, centre_square
from pennyclip.weights.build import build

IMAGES = Path(__file__).resolve().parents[2] / "examples/clipart/images"
SIZE = 224


@pytest.fixture(scope="module", params=[SIZE, 96], ids=["enlarged", "made smaller"])
def both(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [N, 3, size, size] by ours and by open_clip's, of pictures that have another size."""
    size = request.param
    theirs = open_clip.image_transform(size, is_train=False, mean=(0, 0, 0), std=(1, 1, 1))
    pictures = [Image.open(file).convert("RGB") for file in sorted(IMAGES.glob("*.jpg"))[::8]]
    pictures = [picture for picture in pictures if min(picture.size) < SIZE]
    squares = [torch.from_numpy(centre_square(np.array(one), size)) for one in pictures]
    return (
        torch.stack(squares).permute(0, 3, 1, 2).contiguous(),
        torch.stack([(255 * theirs(one)).round().byte() for one in pictures]),
    )


def test_few_values_differ_and_hardly(both: tuple[torch.Tensor, torch.Tensor]) -> None:
    ours, theirs = both
    difference = (ours.int() - theirs.int()).abs()
    assert len(ours) > 30
    assert 0 < (difference > 0).float().mean() < 0.005  # 0.3 % when this was written
    assert difference.float().mean((1, 2, 3)).max() < 0.01  # of 255, the mean of any picture
    assert difference.max() <= 2


def test_of_a_line_the_middle_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLIP's own would make 224 x 896,000 pixels of it first."""
    made: list[tuple[int, int]] = []
    original = resize.resize

    def watched(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
        made.append((height, width))
        return original(pixels, height, width)

    monkeypatch.setattr(resize, "resize", watched)
    line = np.random.default_rng(0).integers(0, 256, (1, 4000, 3), np.uint8)
    middle = line[:, 2000 - LONGEST // 2 : 2000 + LONGEST // 2]
    for some, part in ((line, middle), (line.swapaxes(0, 1), middle.swapaxes(0, 1))):
        square = centre_square(some, SIZE)
        assert square.shape == (SIZE, SIZE, 3)
        assert np.array_equal(square, centre_square(part, SIZE))
    assert {max(size) for size in made} == {LONGEST * SIZE}


def test_embeddings_differ_by_at_most_0_02(both: tuple[torch.Tensor, torch.Tensor]) -> None:
    image = ImageTower(name="tf_efficientnet_lite0", weights="package:efficientnet-lite0")
    text = ClipText(width=64, layers=1, heads=2)
    model, _ = build(Model(image=image, text=text, embed_dim=32), seed=0)
    model.eval()
    with torch.no_grad():
        ours, theirs = (F.normalize(model.visual.features(some), dim=-1) for some in both)
    apart = (ours - theirs).norm(dim=-1)
    assert apart.median() < 0.005
    assert 0 < apart.max() <= 0.02
    assert F.cosine_similarity(ours, theirs).min() > 0.9998
    others = torch.cdist(ours, ours) + 9 * torch.eye(len(ours))
    assert others.min() > 10 * apart.max()  # another picture is far away


def test_a_crop_is_resized_with_its_colours_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch takes each colour by itself, in three times the time."""
    made: list[torch.Tensor] = []
    original = F.interpolate

    def watched(planes: torch.Tensor, *rest: object, **more: object) -> torch.Tensor:
        made.extend((planes, original(planes, *rest, **more)))
        return made[-1]

    monkeypatch.setattr(F, "interpolate", watched)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    square = resize.resize(pixels[3:50, 4:70], 24, 32)
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in made)
    assert made[0].stride(0) == 47 * 66 * 3  # by which torch decides
    assert made[1].data_ptr() == square.ctypes.data  # no copy
