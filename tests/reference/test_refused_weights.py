"""Weights that do not fit are refused, with the keys that show it."""

from pathlib import Path

import pytest
import timm
import torch
from open_clip.model import CLIP as OpenClip
from open_clip.model import CustomTextCLIP
from tiny_towers import EMBED, LENGTH, VOCABULARY, WIDTH, config, eva_file, native, shake

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ClipText, ImageTower, Model
from pennyclip.model.clip import CLIP
from pennyclip.weights.build import build
from pennyclip.weights.load import load_tower
from pennyclip.weights.read import WeightsFile
from pennyclip.weights.statements import Statements


def refused(model: Model) -> str:
    with pytest.raises(RequestError) as caught:
        build(model, seed=0)
    return str(caught.value)


def test_a_masked_image_model_does_not_fit_the_clip_variant(tmp_path: Path) -> None:
    path = tmp_path / "eva02_mim.pt"
    eva_file(path, "eva02_pico_split_64", kind="mim")
    message = refused(config(path, "eva02_pico_clip_64", both=False))
    assert "inner attention norm: no in the file, yes in the tower" in message
    assert "visual.trunk.blocks.0.attn.norm.weight: not in the file" in message
    allowed = config(
        path, "eva02_pico_clip_64", both=False, new_keys=("trunk.blocks.*.attn.norm.*",)
    )
    _, (match,) = build(allowed, seed=0)
    assert sorted(n for n in match.new if "attn.norm" in n)[0].endswith("blocks.0.attn.norm.bias")


def test_another_rope_grid_fits_by_shape_and_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "eva02_mim.pt"
    eva_file(path, "eva02_pico_split_64", kind="mim")
    message = refused(config(path, "eva02_pico_ref4_64", both=False))
    assert "rope: reference grid 8 in the file, reference grid 4 in the tower" in message


def test_norms_behind_the_blocks_fit_by_shape_and_are_refused(tmp_path: Path) -> None:
    """No key shows it: a file's timm configuration does, or its name, or E/14's width."""
    model = shake(timm.create_model("eva_pico_postnorm_clip_64", num_classes=0))
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    message = refused(config(tmp_path, "eva_pico_patch16_clip_64", both=False))
    assert "norm order: post in the file, pre in the tower" in message
    build(config(tmp_path, "eva_pico_postnorm_clip_64", both=False), seed=0)
    eva_file(path := tmp_path / "EVA02_CLIP_E_psz14.pt", "eva_pico_postnorm_clip_64", kind="clip")
    wrong = config(path, "eva_pico_patch16_clip_64", head_bias=True)
    assert "norm order: post in the file, pre in the tower" in refused(wrong)


def test_renamed_keys_are_named(tmp_path: Path) -> None:
    path = tmp_path / "clip.pt"
    state = native().state_dict()
    visual = [key for key in state if key.startswith("visual.")]
    renamed = visual[5::20]
    torch.save({f"{k}_old" if k in renamed else k: v for k, v in state.items()}, path)
    assert len(renamed) / len(visual) == pytest.approx(0.05, abs=0.02)
    message = refused(config(path, "vit_pico_patch16_clip_64"))
    for key in renamed:
        assert f"{key}_old: no part of this tower has such a key" in message
    assert "not in the file" in message


def test_a_classifier_is_refused_unless_named(tmp_path: Path) -> None:
    path = tmp_path / "eva02_in1k.pt"
    model = shake(timm.create_model("eva02_pico_split_64", num_classes=1000, global_pool="avg"))
    torch.save(model.state_dict(), path)
    message = refused(config(path, "eva02_pico_split_64", both=False))
    assert "head.weight: shape [1000, 64]" in message
    assert 'model.image.drop_keys = ["head.*"]' in message
    kept = config(path, "eva02_pico_split_64", both=False, drop_keys=("head.*",))
    _, (match,) = build(kept, seed=0)
    assert match.dropped == dict.fromkeys(
        ("head.weight", "head.bias"), "left out by the recipe (head.*)"
    )
    assert match.share == 1.0
    idle = config(path, "eva02_pico_split_64", both=False, drop_keys=("head.*", "haed.*"))
    assert "'haed.*' matches nothing" in refused(idle)


def test_another_width_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wide.pt"
    vision = {"image_size": 64, "patch_size": 16, "width": 128, "layers": 2, "head_width": 64}
    text = {
        "context_length": LENGTH,
        "vocab_size": VOCABULARY,
        "width": WIDTH,
        "heads": 1,
        "layers": 2,
    }
    torch.save(OpenClip(EMBED, vision, text).state_dict(), path)
    message = refused(config(path, "vit_pico_patch16_clip_64"))
    assert "visual.class_embedding: shape [128]" in message
    assert "visual.trunk.cls_token has [1, 1, 64]" in message
    assert " 0.0% of it would be loaded" in message


def test_a_text_tower_of_another_embedding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "clip.pt"
    torch.save(native().state_dict(), path)
    model = config(path, "vit_pico_patch16_clip_64")
    wide = Model(image=ImageTower(name="vit_pico_patch16_clip_64"), text=model.text, embed_dim=48)
    assert "text_projection: shape [64, 32]" in refused(wide)


def test_a_clip_resnet_is_refused_with_the_way_out(tmp_path: Path) -> None:
    vision = {"image_size": 64, "layers": (1, 1, 1, 1), "width": 16}
    text = {"context_length": LENGTH, "vocab_size": VOCABULARY, "width": WIDTH, "layers": 2}
    torch.save(OpenClip(EMBED, vision, text).state_dict(), path := tmp_path / "RN50.pt")
    message = refused(config(path, "vit_pico_patch16_clip_64"))
    assert "visual.conv1.weight: of CLIP's ResNet under OpenAI's names" in message
    assert "hub:timm/resnet50_clip.openai" in message
    with torch.device("meta"):
        file = timm.create_model("resnet50_clip.openai", num_classes=1024).state_dict()
        image = ImageTower(name="resnet50_clip", head_bias=True)
        text = ClipText(width=WIDTH, layers=1, heads=1)
        model = CLIP(Model(image=image, text=text, embed_dim=1024))
    weights = WeightsFile("RN50", tmp_path, None, file)
    match = load_tower(model, "image", weights, said=Statements())
    match.check()
    assert not match.new


def test_a_text_mlp_of_another_ratio_is_refused_with_the_reason(tmp_path: Path) -> None:
    vision = {"image_size": 64, "patch_size": 16, "width": WIDTH, "layers": 2, "head_width": 64}
    text = {
        "context_length": LENGTH, "vocab_size": VOCABULARY, "width": WIDTH, "heads": 1,
        "layers": 2, "mlp_ratio": 2.0,
    }  # fmt: skip
    state = CustomTextCLIP(EMBED, vision, text).state_dict()
    torch.save(state, path := tmp_path / "clip.pt")
    message = refused(config(path, "vit_pico_patch16_clip_64"))
    assert "c_fc.weight: shape [128, 64]" in message
    assert "MLPs of 4 times its width" in message


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", None])
def test_a_file_without_weights_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "weights.pt"
    if content is None:
        torch.save({"state_dict": {}}, path)
    else:
        path.write_bytes(content)
    message = refused(config(path, "vit_pico_patch16_clip_64"))
    assert str(path) in message
