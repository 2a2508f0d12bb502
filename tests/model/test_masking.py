"""FLIP's masks: drawn for a global batch, and worth exactly a run on the kept patches."""

from functools import partial

import pytest
import timm
import torch

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ImageTower as ImageConfig
from pennyclip.model.image import ImageTower
from pennyclip.model.masking import keep_indices

SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
TOKEN_TOWERS = {
    "ViT, class token": ("vit_base_patch16_clip_224", {}),
    "ViT, mean of the patches": ("vit_base_patch16_224", {"global_pool": "avg"}),
    "ViT, registers": ("vit_base_patch14_reg4_dinov2", {}),
    "ViT, attention pooling": ("vit_base_patch16_siglip_224", {}),
    "EVA-02, rotary, mean": ("eva02_tiny_patch14_224", {}),
    "EVA-02 CLIP, rotary, class token": ("eva02_base_patch16_clip_224", {}),
    "EVA-01": ("eva_large_patch14_196", {}),
    "DINOv3, rotary, registers": ("vit_small_patch16_dinov3", {}),
    "rotary, a table a layer": ("vit_base_patch16_rope_mixed_224", {}),
}


def tower(name, monkeypatch, **overrides):
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, **SMALL, **overrides))
    torch.manual_seed(0)
    built = ImageTower(ImageConfig(name=name, image_size=48), embed_dim=16)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return built


def images(batch=3):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (batch, 3, 48, 48), generator=generator, dtype=torch.uint8)


def draw(batch, patches, ratio, step=5):
    return keep_indices(batch, patches, ratio, seed=3, step=step, device="cpu")


@pytest.fixture(params=TOKEN_TOWERS)
def token_tower(request, monkeypatch):
    name, overrides = TOKEN_TOWERS[request.param]
    return tower(name, monkeypatch, **overrides).train()


@torch.no_grad()
def test_kept_tokens_come_out_as_if_the_others_were_hidden(token_tower):
    """The reference: the whole sequence, with attention barred from the dropped patches."""
    trunk, prefix = token_tower.trunk, token_tower.trunk.num_prefix_tokens
    keep = draw(3, token_tower.patches(), 0.5)
    x = token_tower.normalize(images())
    visible = torch.zeros(3, prefix + token_tower.patches(), dtype=torch.bool)
    visible[:, :prefix] = True
    visible.scatter_(1, prefix + keep, True)
    states = trunk.forward_features(x, attn_mask=visible[:, None, None, :])
    kept = torch.stack([row[shown] for row, shown in zip(states, visible, strict=True)])
    expected = trunk.forward_head(kept, pre_logits=True)
    torch.testing.assert_close(token_tower.features(images(), keep), expected, atol=2e-5, rtol=1e-4)
    unmasked = token_tower.features(images())
    assert (unmasked - expected).abs().max() > 1e-2


@torch.no_grad()
def test_keeping_everything_changes_nothing(token_tower):
    keep = draw(3, token_tower.patches(), 0.0)
    assert torch.equal(token_tower(images(), keep), token_tower(images()))


@torch.no_grad()
def test_eva_runs_on_the_kept_tokens_alone_with_their_own_rotations(monkeypatch):
    """By hand, one image at a time: tokens and rotary rows chosen before the blocks."""
    built = tower("eva02_base_patch16_clip_224", monkeypatch).train()
    trunk = built.trunk
    keep = draw(3, built.patches(), 0.5)
    features = built.features(images(), keep)
    sequence = trunk.patch_embed(built.normalize(images()))
    sequence = torch.cat([trunk.cls_token.expand(3, -1, -1), sequence], 1) + trunk.pos_embed
    for i in range(3):
        x = torch.cat([sequence[i, :1], sequence[i, 1:][keep[i]]])[None]
        for block in trunk.blocks:
            x = block(x, rope=trunk.rope.get_embed()[keep[i]])
        torch.testing.assert_close(features[i], trunk.norm(x)[0, 0], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_slice_of_the_batch_sees_the_same_patches(token_tower):
    keep = draw(4, token_tower.patches(), 0.75)
    whole = token_tower(images(4), keep)
    halves = [token_tower(images(4)[rows], keep[rows]) for rows in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(whole, torch.cat(halves), atol=1e-5, rtol=1e-5)


def test_masks_are_ascending_distinct_and_drawn_by_seed_and_step():
    keep = draw(64, 196, 0.75)
    assert keep.dtype == torch.int64
    assert keep.shape == (64, 49)
    assert (keep.diff(dim=1) > 0).all()
    assert keep.min() >= 0
    assert keep.max() < 196
    assert torch.equal(keep, draw(64, 196, 0.75))
    assert not torch.equal(keep, draw(64, 196, 0.75, step=6))
    other_seed = keep_indices(64, 196, 0.75, seed=4, step=5, device="cpu")
    assert not torch.equal(keep, other_seed)
    # 64 * 49 draws over 196 patches: 16 each, deviation 3.5; six deviations are left.
    counts = keep.flatten().bincount(minlength=196)
    assert counts.min() >= 1
    assert counts.max() <= 37


@pytest.mark.parametrize(("ratio", "kept"), [(0.0, 49), (0.5, 24), (0.75, 12), (0.99, 1)])
def test_how_many_patches_stay(ratio, kept):
    assert draw(2, 49, ratio).shape == (2, kept)


@pytest.mark.parametrize("ratio", [-0.1, 1.0])
def test_a_ratio_outside_its_range_is_refused(ratio):
    with pytest.raises(RequestError, match=r"mask ratio must lie in \[0, 1\)"):
        draw(2, 49, ratio)


@pytest.mark.parametrize("name", ["test_convnext", "test_resnet", "swin_tiny_patch4_window7_224"])
def test_towers_without_a_sequence_of_patches_are_refused(name):
    built = ImageTower(ImageConfig(name=name, image_size=224), embed_dim=16)
    with pytest.raises(RequestError, match=f"'{name}' cannot be masked"):
        built.patches()


def test_gradients_reach_only_the_kept_patches(monkeypatch):
    built = tower("vit_base_patch16_clip_224", monkeypatch).train()
    keep = torch.tensor([[0, 4, 9], [0, 4, 9]])
    built(images(2), keep).square().sum().backward()
    touched = built.trunk.pos_embed.grad[0].abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == [0, 1, 5, 10]  # the class token and 1 + keep


def test_no_masking_in_evaluation(monkeypatch):
    built = tower("vit_base_patch16_clip_224", monkeypatch).eval()
    with pytest.raises(AssertionError, match="never masked in evaluation"):
        built(images(), draw(3, built.patches(), 0.5))
    built.train()(images(), draw(3, built.patches(), 0.5))
    whole = built(images())
    assert torch.equal(built.eval()(images()), whole)  # nothing is left behind by a masked pass
