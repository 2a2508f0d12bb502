"""Folders of open_clip's and transformers' opened as they are: the same embeddings as there."""

import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from open_clip.model import CLIP as OpenClip
from open_clip.model import CustomTextCLIP
from PIL import Image
from tiny_towers import CLIP_MEAN, CLIP_STD, shake
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, SiglipConfig, SiglipModel

from pennyclip.base.errors import RequestError
from pennyclip.commands.export.tokenizer import write_clip_tokenizer
from pennyclip.evaluation.encoder import load
from pennyclip.weights.adopt import adopt

TEXTS = ["a photo of a cat", "Two dogs, running over the grass"]
VISION = {"image_size": 64, "patch_size": 16, "width": 64, "layers": 2, "head_width": 64}
TEXT = {"context_length": 20, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2}
PREPROCESS = {"mean": list(CLIP_MEAN), "std": list(CLIP_STD)}


def pictures() -> list[Image.Image]:
    values = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    return [Image.fromarray(value) for value in values]


def pixels() -> torch.Tensor:
    shift, scale = (torch.tensor(v).view(3, 1, 1) for v in (CLIP_MEAN, CLIP_STD))
    images = torch.from_numpy(np.stack([np.array(p) for p in pictures()]))
    return (images.permute(0, 3, 1, 2) / 255 - shift) / scale


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.01
    torch.testing.assert_close(ours, F.normalize(theirs), atol=1e-5, rtol=0)


def open_clip_folder(folder: Path, model: torch.nn.Module, **config: object) -> Path:
    tree = {"model_cfg": {"embed_dim": 32} | config, "preprocess_cfg": PREPROCESS}
    (folder / "open_clip_config.json").write_text(json.dumps(tree))
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    return folder


@pytest.mark.parametrize("quick_gelu", [False, True])
@torch.no_grad()
def test_open_clip_s_own_names(tmp_path: Path, quick_gelu: bool) -> None:
    theirs = shake(OpenClip(32, VISION, TEXT, quick_gelu=quick_gelu))
    config = {"vision_cfg": VISION, "text_cfg": TEXT, "quick_gelu": quick_gelu}
    encoder = load(open_clip_folder(tmp_path, theirs, **config))
    assert_same(encoder.encode_image(pictures()), theirs.encode_image(pixels()))
    tokens = open_clip.tokenize(TEXTS, context_length=20)
    assert_same(encoder.encode_text(TEXTS), theirs.encode_text(tokens))
    assert encoder.model.logit_scale.item() == pytest.approx(theirs.logit_scale.item())


@torch.no_grad()
def test_open_clip_with_a_timm_trunk(tmp_path: Path) -> None:
    vision = {
        "timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear",
        "image_size": 64,
    }  # fmt: skip
    theirs = shake(CustomTextCLIP(32, vision | {"timm_model_pretrained": False}, TEXT))
    config = {"vision_cfg": vision, "text_cfg": TEXT, "custom_text": True}
    encoder = load(open_clip_folder(tmp_path, theirs, **config))
    assert_same(encoder.encode_image(pictures()), theirs.encode_image(pixels()))
    tokens = open_clip.tokenize(TEXTS, context_length=20)
    assert_same(encoder.encode_text(TEXTS), theirs.encode_text(tokens))


@torch.no_grad()
def test_transformers_clip(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1,
        "intermediate_size": 256,
    }  # fmt: skip
    config = CLIPConfig(
        vision_config=sizes | {"image_size": 64, "patch_size": 16},
        text_config=sizes | {
            "vocab_size": 49408, "max_position_embeddings": 20, "eos_token_id": 49407,
        },
        projection_dim=32,
    )  # fmt: skip
    theirs = shake(CLIPModel(config))
    theirs.save_pretrained(tmp_path)
    CLIPImageProcessor().save_pretrained(tmp_path)
    write_clip_tokenizer(tmp_path)
    encoder = load(tmp_path)
    tokens = open_clip.tokenize(TEXTS, context_length=20)
    real = tokens != 0
    answer = theirs(input_ids=tokens, attention_mask=real.long(), pixel_values=pixels())
    assert_same(encoder.encode_image(pictures()), answer.image_embeds)
    assert_same(encoder.encode_text(TEXTS), answer.text_embeds)


def test_transformers_siglip_is_described(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 256,
    }  # fmt: skip
    config = SiglipConfig(
        vision_config=sizes | {"image_size": 64, "patch_size": 16},
        text_config=sizes | {"vocab_size": 300, "max_position_embeddings": 16},
    )
    SiglipModel(config).save_pretrained(tmp_path)
    model = adopt(tmp_path)
    assert model.image.name == "vit_pico_patch16_siglip_64"
    assert (model.image.head, model.image.pool, model.logit_bias) == ("none", "map", True)
    assert model.text.tokenizer == str(tmp_path)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_base_patch32_clip_224", (32, 768, 12, 12, 3072)),
        ("vit_large_patch14_clip_336", (14, 1024, 24, 16, 4096)),
        ("vit_huge_patch14_clip_224", (14, 1280, 32, 16, 5120)),
    ],
)
def test_published_sizes_have_their_timm_names(
    tmp_path: Path, name: str, size: tuple[int, ...]
) -> None:
    patch, width, layers, heads, hidden = size
    vision = {
        "image_size": int(name.rsplit("_", 1)[1]), "patch_size": patch, "width": width,
        "layers": layers, "head_width": width // heads, "mlp_ratio": hidden / width,
    }  # fmt: skip
    tree = {"model_cfg": {"embed_dim": 512, "vision_cfg": vision, "text_cfg": {}}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(tree))
    found = adopt(tmp_path).image
    assert (found.name, found.image_size) == (name, vision["image_size"])
    assert timm.is_model(found.name)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"embed_dim": 8, "vision_cfg": {"layers": [3, 4, 6, 3]}, "text_cfg": {}}, "a ResNet"),
        ({"vision_cfg": {}, "text_cfg": {}, "multimodal_cfg": {}}, "no plain CLIP"),
        ({"vision_cfg": VISION | {"pool_type": "avg"}, "text_cfg": {}}, "vision_cfg has {'pool_ty"),
        (
            {"vision_cfg": VISION, "text_cfg": {"tokenizer_kwargs": {"clean": "canonicalize"}}},
            "text_cfg has {'tokenizer_kwargs'",
        ),
        ({"vision_cfg": {"timm_model_name": "nosuch"}, "text_cfg": {}}, "has no model 'nosuch'"),
        (
            {"vision_cfg": VISION | {"width": 96, "head_width": 48}, "text_cfg": {}},
            "timm .* has no 'clip' vision transformer with patches of 16 pixels, width 96",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(
    tmp_path: Path, tree: dict[str, object], message: str
) -> None:
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": tree}))
    with pytest.raises(RequestError, match=message):
        load(tmp_path)


def test_other_models_of_transformers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "blip"}))
    with pytest.raises(RequestError, match=r"model_type is .blip.\. Read here are clip, siglip"):
        load(tmp_path)
