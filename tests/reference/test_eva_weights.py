"""EVA's files under their authors' names give timm's own embeddings."""

from pathlib import Path

import pytest
import torch
from tiny_towers import (
    assert_all_accounted,
    assert_equal_towers,
    captions,
    config,
    eva_file,
    images,
    native,
)

from pennyclip.base.errors import RequestError
from pennyclip.weights.build import build


@pytest.mark.parametrize(
    "name", ["eva_pico_patch16_64", "eva02_pico_fused_64", "eva02_pico_split_64"]
)
def test_eva_masked_image_model(tmp_path: Path, name: str) -> None:
    path = tmp_path / "eva_mim.pt"
    reference = eva_file(path, name, kind="mim")
    built, (match,) = build(config(path, name, both=False, pool="token"), seed=0)
    built.eval()
    with torch.no_grad():
        torch.testing.assert_close(built.visual.features(images()), reference, atol=1e-5, rtol=1e-5)
    assert match.trained == "masked image modelling"
    assert match.share == 1.0
    assert_all_accounted(match, path)
    assert match.new == ["visual.head.proj.weight"]
    assert match.dropped["mask_token"] == "stands for masked patches in pretraining"
    tables = 0 if name.startswith("eva_") else 6
    assert len(match.derived) == tables
    assert match.matched["norm.weight"] == "visual.trunk.norm.weight"


def test_a_mean_pooling_tower_norms_after_pooling_with_the_masked_models_norm(
    tmp_path: Path,
) -> None:
    path = tmp_path / "eva_mim.pt"
    eva_file(path, "eva02_pico_split_64", kind="mim")
    _, (match,) = build(config(path, "eva02_pico_split_64", both=False, pool="avg"), seed=0)
    assert match.matched["norm.weight"] == "visual.trunk.fc_norm.weight"
    assert match.share == 1.0


@pytest.mark.parametrize(
    "name", ["eva_pico_patch16_clip_64", "eva02_pico_clip_64", "eva_pico_postnorm_clip_64"]
)
def test_eva_clip(tmp_path: Path, name: str) -> None:
    path = tmp_path / "EVA_CLIP.pt"
    reference = eva_file(path, name, kind="clip")
    with torch.no_grad():
        text = native(quick_gelu=False).encode_text(captions()[0])
    assert_equal_towers(path, config(path, name, head_bias=True), reference, text)
    _, (match, _) = build(config(path, name, head_bias=True), seed=0)
    assert match.trained.startswith("CLIP")
    assert match.matched["visual.head.weight"] == "visual.head.proj.weight"


def test_eva_clip_pools_its_class_token_whatever_timms_default(tmp_path: Path) -> None:
    path = tmp_path / "EVA_CLIP.pt"
    reference = eva_file(path, "eva_pico_patch16_clip_64", kind="clip")
    asked = config(path, "eva_pico_patch16_64", head_bias=True)  # timm's default there: the mean
    assert_equal_towers(path, asked, reference, None)
    with pytest.raises(RequestError, match=r"pool = 'avg' contradicts.*'token'"):
        build(config(path, "eva_pico_patch16_64", head_bias=True, pool="avg"), seed=0)
