"""open_clip loads our checkpoint folders through `local-dir:`, and sees the same."""

from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from pennyclip.config.keys import ClipText, ImageTower, Model, TransformersText
from pennyclip.data.loader import fit_square
from pennyclip.evaluation.encoder import load
from pennyclip.weights.build import build, text_folder
from pennyclip.weights.checkpoint import write_model

TEXTS = ["a photo of a cat", "!", "two dogs, running " * 30]

ROOT = Path(__file__).resolve().parents[2]
TRANSFORMERS = TransformersText(name="package:all-minilm-l6-v2", head="mlp", context_length=128)
CASES = {
    "clip text, linear": Model(
        image=ImageTower(name="vit_tiny_patch16_224"),
        text=ClipText(width=64, layers=2, heads=2),
        embed_dim=32,
    ),
    "quick gelu, convolutional": Model(
        image=ImageTower(name="tf_efficientnet_lite0", head="mlp", mean=(0.4, 0.5, 0.6)),
        text=ClipText(width=64, layers=2, heads=2, activation="quick_gelu", context_length=40),
        embed_dim=32,
    ),
    "another image size, pooling": Model(
        image=ImageTower(name="vit_tiny_patch16_224", image_size=96, pool="avg"),
        text=ClipText(width=64, layers=2, heads=2),
        embed_dim=32,
    ),
    "another activation": Model(
        image=ImageTower(name="vit_tiny_patch16_224", activation="quick_gelu"),
        text=ClipText(width=64, layers=2, heads=2),
        embed_dim=32,
    ),
    "transformers text": Model(
        image=ImageTower(name="tf_efficientnet_lite0", weights="package:efficientnet-lite0"),
        text=TRANSFORMERS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_open_clip_gives_the_same_embeddings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CASES[name]
    model, _ = build(config, seed=1)
    with torch.no_grad():  # so that positions and biases count
        for parameter in model.text.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    (folder := tmp_path / "checkpoint").mkdir()
    about = {"step": 3, "score": None, "dataset": ""}
    write_model(folder, model, text_folder(config), about)
    ours, shape = load(folder), (config.image.image_size, config.image.image_size, 3)
    pictures = [  # of the model's size: no two libraries resize noise alike
        Image.fromarray(np.random.default_rng(i).integers(0, 256, shape, np.uint8)) for i in (0, 1)
    ]
    images, texts = ours.encode_image(pictures), ours.encode_text(TEXTS)

    monkeypatch.chdir(folder)  # where it looks for a transformers text tower's configuration
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    theirs.eval()
    with torch.no_grad():
        same_images = theirs.encode_image(torch.stack([transform(p) for p in pictures]))
        same_texts = theirs.encode_text(tokenizer(TEXTS))
    torch.testing.assert_close(images, F.normalize(same_images, dim=-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(texts, F.normalize(same_texts, dim=-1), atol=1e-5, rtol=0)
    assert abs(images[0] @ images[1]) < 0.9999  # they do see something
    assert theirs.logit_scale == model.logit_scale


@pytest.mark.parametrize("size", [224, 96])
def test_pictures_of_every_shape_are_cut_as_open_clip_cuts_them(size: int) -> None:
    transform = open_clip.image_transform(size, is_train=False, mean=(0, 0, 0), std=(1, 1, 1))
    files = sorted((ROOT / "examples/clipart/images").iterdir())[::100]
    shapes = set()
    for file in files:
        picture = Image.open(file).convert("RGB")
        shapes.add(picture.size)
        ours = fit_square(np.array(picture), size).float()
        theirs = 255 * transform(picture)
        assert (ours - theirs).abs().mean() < 0.02, file.name
    assert len(shapes) > 5
