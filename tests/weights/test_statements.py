"""What weights say about their use, and what becomes of a recipe that says otherwise."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ClipText, ImageTower, TransformersText
from pennyclip.weights.read import WeightsFile
from pennyclip.weights.statements import (
    Statements,
    read_statements,
    resolve_image,
    resolve_text,
)

ONE = torch.ones(1)
HALF = (0.5, 0.5, 0.5)


def file(folder: Path | None, *keys: str, name: str = "w.pt") -> WeightsFile:
    state: dict[str, Tensor] = dict.fromkeys(keys, ONE)
    return WeightsFile(name, Path(name), folder, state)


def folder(path: Path, **files: object) -> Path:
    for name, tree in files.items():
        (path / f"{name}.json").write_text(json.dumps(tree))
    return path


def test_a_timm_folder(tmp_path: Path) -> None:
    config = {
        "architecture": "vit_base_patch32_clip_quickgelu_224",
        "global_pool": "token",
        "pretrained_cfg": {"tag": "openai", "mean": [0.5, 0.4, 0.3], "std": HALF},
    }
    said = read_statements(file(folder(tmp_path, config=config), "blocks.0.norm1.weight"))
    assert (said.image_activation, said.image_pool) == ("quick_gelu", "token")
    assert said.mean == (0.5, 0.4, 0.3)
    assert said.trained.startswith("CLIP")


def test_an_open_clip_folder(tmp_path: Path) -> None:
    config = {
        "model_cfg": {
            "quick_gelu": True,
            "vision_cfg": {"timm_model_name": "eva02_base_patch16_clip_224", "timm_pool": "token"},
            "text_cfg": {"width": 512},
        },
        "preprocess_cfg": {"mean": HALF, "std": HALF},
    }
    said = read_statements(file(folder(tmp_path, open_clip_config=config), "logit_scale"))
    assert said.text_activation == "quick_gelu"
    assert said.image_activation is None  # SwiGLU, and open_clip's switch is not for timm's towers
    assert (said.image_pool, said.mean) == ("token", HALF)


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        (("mask_token", "lm_head.weight", "blocks.0.attn.q_bias"), "masked image modelling"),
        (("blocks.0.attn.inner_attn_ln.weight", "head.weight"), "CLIP (image-text pairs)"),
        (("visual.proj", "visual.conv1.weight"), "CLIP (image-text pairs)"),
        (("logit_scale", "logit_bias"), "SigLIP (image-text pairs)"),
        (("blocks.0.norm1.weight",), "not said"),
    ],
)
def test_what_weights_were_trained_for(keys: tuple[str, ...], trained: str) -> None:
    assert read_statements(file(None, *keys)).trained == trained


def test_merged2b_is_named_as_clip_trained() -> None:
    said = read_statements(
        file(None, "blocks.0.norm1.weight", name="eva02_base_patch16_clip_224.merged2b.pt")
    )
    assert said.trained == "CLIP (image-text pairs)"


def test_mean_pooling_shows_in_the_keys() -> None:
    assert read_statements(file(None, "fc_norm.weight")).image_pool == "avg"
    assert read_statements(file(None, "visual.trunk.attn_pool.latent")).image_pool == "map"


def test_an_open_key_is_taken_and_a_contradiction_refused() -> None:
    said = Statements(image_activation="quick_gelu", mean=HALF, std=HALF, image_pool="token")
    open_keys = resolve_image(ImageTower(name="vit_base_patch32_clip_224"), said, "w.pt")
    assert open_keys.name == "vit_base_patch32_clip_quickgelu_224"
    assert (open_keys.mean, open_keys.pool) == (HALF, "token")
    near = ImageTower(name="vit_base_patch32_clip_224", mean=(0.5, 0.5, 0.5004))
    assert resolve_image(near, said, "w.pt").mean == (0.5, 0.5, 0.5004)
    with pytest.raises(RequestError, match=r"model\.image\.pool = 'avg' contradicts .*w\.pt"):
        resolve_image(ImageTower(name="x", pool="avg"), said, "w.pt")
    plain = Statements(image_activation="gelu")
    with pytest.raises(RequestError, match="'quick_gelu' contradicts"):
        resolve_image(ImageTower(name="vit_base_patch32_clip_quickgelu_224"), plain, "w.pt")


def test_text_statements() -> None:
    said = Statements(text_activation="gelu_tanh", text_family="siglip", pad_id=0)
    resolved = resolve_text(ClipText(family="siglip"), said, "w.pt")
    assert isinstance(resolved, ClipText)
    assert (resolved.activation, resolved.pad_id) == ("gelu_tanh", 0)
    with pytest.raises(RequestError, match="pad_id = 1 contradicts"):
        resolve_text(ClipText(family="siglip", pad_id=1), said, "w.pt")
    silent = resolve_text(ClipText(), Statements(), "w.pt")
    assert isinstance(silent, ClipText)
    assert silent.activation == "gelu"


def test_a_sentence_encoders_pooling_is_not_overruled(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    folder(tmp_path / "1_Pooling", config={"pooling_mode_cls_token": True})
    said = read_statements(file(tmp_path, "embeddings.word_embeddings.weight"))
    assert said.text_pool == "cls"
    with pytest.raises(RequestError, match="pool = 'mean' contradicts"):
        resolve_text(TransformersText(name="x", pool="mean"), said, "w")
