"""EVA's releases told apart by keys and shapes alone, those of the published models."""

import math

import pytest
import timm
import torch
from torch import Tensor

from pennyclip.weights.describe import describe


def keys(name: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        return timm.create_model(name, num_classes=0).state_dict()


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        (
            "eva_giant_patch14_224",
            {"mlp": "plain", "qkv": "fused", "qkv_bias": "q and v", "mlp_norm": "no",
             "pooling": "avg", "grid": "16 x 16"},
        ),
        (
            "eva02_tiny_patch14_224",
            {"mlp": "SwiGLU, fused", "qkv": "fused", "mlp_norm": "no", "norm_order": "pre"},
        ),
        (
            "eva02_base_patch14_224",
            {"mlp": "SwiGLU, separate", "qkv": "separate", "mlp_norm": "yes",
             "inner_attention_norm": "no", "qkv_bias": "q and v", "patch": "14"},
        ),
        (
            "eva02_base_patch16_clip_224",
            {"inner_attention_norm": "yes", "mlp_norm": "yes", "pooling": "token", "patch": "16",
             "grid": "14 x 14"},
        ),
        ("eva02_enormous_patch14_clip_224", {"norm_order": "post", "mlp": "plain"}),
        (
            "vit_base_patch16_siglip_224",
            {"pooling": "map", "class_token": "no", "qkv_bias": "q, k and v", "grid": "14 x 14"},
        ),
    ],
)  # fmt: skip
def test_published_architectures(name: str, facts: dict[str, str]) -> None:
    found = describe(keys(name))
    assert found is not None
    assert {key: found.tree()[key] for key in facts} == facts


def test_the_tower_itself_tells_more() -> None:
    with torch.device("meta"):
        post = timm.create_model("eva02_enormous_patch14_clip_224", num_classes=0)
        rope = timm.create_model("eva02_base_patch14_448", num_classes=0)
    assert describe(post.state_dict(), post).norm_order == "post"
    found = describe(rope.state_dict(), rope)
    assert (found.rope, found.norm_order, found.grid) == ("reference grid 16", "pre", "32 x 32")


def test_the_reference_grid_is_read_out_of_a_rope_table() -> None:
    """At 448 pixels EVA-02 has 32 x 32 patches, and angles laid out for 16 x 16."""
    state = keys("eva02_base_patch14_448")
    table = torch.zeros(32 * 32, 64)
    table[1, 32:] = 16 / 32  # the second patch of the first row; frequency 1
    state |= {"rope.freqs_cos": table.cos(), "rope.freqs_sin": table.sin()}
    assert describe(state).rope == "reference grid 16"
    assert math.isclose(float(table[1, 32]), 0.5)


def test_differences_are_named() -> None:
    masked, clip = (
        describe(keys("eva02_base_patch14_224")),
        describe(keys("eva02_base_patch16_clip_224")),
    )
    assert masked.differences(clip) == ["inner attention norm: no in the file, yes in the tower"]


def test_heads_tables_and_dtypes() -> None:
    state = {key: value.to(torch.float16) for key, value in keys("eva_giant_patch14_224").items()}
    state |= {
        "head.weight": torch.empty(1000, 1408),
        "blocks.0.attn.relative_position_bias_table": torch.empty(732, 16),
    }
    found = describe(state)
    assert found.head == "classifier of 1000 classes"
    assert found.relative_positions == "yes"
    assert found.dtype == "float16, float32"
    state["head.weight"] = torch.empty(1024, 1408)
    assert describe(state).head == "embedding of 1024"


def test_a_convolutional_network_is_not_described() -> None:
    assert describe(keys("tf_efficientnet_lite0")) is None
