"""Every layout of weights gives the reference implementation's embeddings, and nothing is lost.

All models are the references' own, scaled down, with random weights; no network.
"""

import re
import warnings
from pathlib import Path

import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from open_clip.model import CLIP as OpenClip
from open_clip.model import CustomTextCLIP
from timm.models import generate_default_cfgs, register_model
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pennyclip.config import ClipText, ImageTower, Model
from pennyclip.errors import RequestError
from pennyclip.weights.build import build

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
WIDTH, EMBED, VOCABULARY, LENGTH = 64, 32, 120, 12
CLIP_VIT = {
    "img_size": 64, "patch_size": 16, "embed_dim": WIDTH, "depth": 2, "num_heads": 1,
    "pre_norm": True, "norm_layer": nn.LayerNorm,
}  # fmt: skip
SIGLIP_VIT = {
    "img_size": 64, "patch_size": 16, "embed_dim": WIDTH, "depth": 2, "num_heads": 2,
    "class_token": False, "global_pool": "map",
}  # fmt: skip
EVA_VIT = {"img_size": 64, "patch_size": 16, "embed_dim": WIDTH, "depth": 2, "num_heads": 2}
EVA02 = {"mlp_ratio": 4 * 2 / 3, "swiglu_mlp": True, "use_rot_pos_emb": True, "ref_feat_shape": 8}
EVA02_SPLIT = EVA_VIT | EVA02 | {"qkv_fused": False, "scale_mlp": True}
TOWERS = {
    "vit_pico_patch16_clip_64": (VisionTransformer, CLIP_VIT),
    "vit_pico_patch16_clip_quickgelu_64": (
        VisionTransformer, CLIP_VIT | {"act_layer": "quick_gelu"},
    ),
    "vit_pico_patch16_siglip_64": (VisionTransformer, SIGLIP_VIT),
    "eva_pico_patch16_clip_64": (Eva, EVA_VIT | {"global_pool": "token"}),
    "eva_pico_patch16_64": (Eva, EVA_VIT),
    "eva_pico_postnorm_clip_64": (Eva, EVA_VIT | {"use_post_norm": True, "global_pool": "token"}),
    "eva02_pico_fused_64": (Eva, EVA_VIT | EVA02),
    "eva02_pico_split_64": (Eva, EVA02_SPLIT),
    "eva02_pico_clip_64": (Eva, EVA02_SPLIT | {"scale_attn_inner": True, "global_pool": "token"}),
    "eva02_pico_ref4_64": (Eva, EVA02_SPLIT | {"ref_feat_shape": 4}),
}  # fmt: skip
default_cfgs = generate_default_cfgs(
    {name: {"input_size": (3, 64, 64), "mean": CLIP_MEAN, "std": CLIP_STD} for name in TOWERS}
)


def _register(name: str) -> None:
    kind, arguments = TOWERS[name]

    def create(pretrained: bool = False, **given: object) -> nn.Module:
        known = {k: v for k, v in given.items() if k in ("num_classes", "global_pool", "img_size")}
        model = kind(**(arguments | known))
        model.pretrained_cfg = model.default_cfg = timm.get_pretrained_cfg(name).to_dict()
        return model

    create.__name__, create.__module__ = name, __name__
    register_model(create)


for tower in TOWERS:
    _register(tower)


def shake(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random everywhere: fresh biases are 0 and norms 1, and would hide what is not loaded."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
            if value.ndim == 1:
                value += 0.5
    return module.eval()


def images(size: int = 64) -> Tensor:
    return torch.randint(0, 256, (3, 3, size, size), generator=torch.manual_seed(1)).byte()


def captions() -> tuple[Tensor, Tensor]:
    """Token ids that end with the highest one, as CLIP's do, and lengths."""
    tokens = torch.randint(3, VOCABULARY - 1, (3, LENGTH), generator=torch.manual_seed(2))
    lengths = torch.tensor([5, 12, 2])
    for row, length in enumerate(lengths):
        tokens[row, length - 1], tokens[row, length:] = VOCABULARY - 1, 0
    return tokens, lengths


def pixels(mean: tuple[float, ...] = CLIP_MEAN, std: tuple[float, ...] = CLIP_STD) -> Tensor:
    stats = (torch.tensor(s).view(3, 1, 1) for s in (mean, std))
    shift, scale = stats
    return (images() / 255 - shift) / scale


def config(path: Path, name: str, both: bool = True, **image: object) -> Model:
    text = ClipText(
        width=WIDTH, layers=2, heads=1, context_length=LENGTH, vocab_size=VOCABULARY,
        weights=str(path) if both else None,
    )  # fmt: skip
    tower = ImageTower(name=name, image_size=64, weights=str(path), **image)  # type: ignore[arg-type]
    return Model(image=tower, text=text, embed_dim=EMBED)


def assert_same(ours: Tensor, reference: Tensor) -> None:
    assert reference.std() > 0.01  # of something
    torch.testing.assert_close(F.normalize(ours), F.normalize(reference), atol=1e-5, rtol=0)


@torch.no_grad()
def assert_equal_towers(path: Path, model: Model, image: Tensor, text: Tensor | None) -> None:
    """Load, account for every key, compare the embeddings."""
    built, matches = build(model, seed=3)
    built.eval()
    for match in matches:
        assert match.share == 1.0
        assert not match.new
        assert not match.left_over
    assert_same(built.visual(images()), image)
    if text is not None:
        assert_same(built.text(*captions()), text)


def native(quick_gelu: bool = True) -> OpenClip:
    vision = {"image_size": 64, "patch_size": 16, "width": WIDTH, "layers": 2, "head_width": 64}
    text = {
        "context_length": LENGTH, "vocab_size": VOCABULARY, "width": WIDTH, "heads": 1, "layers": 2,
    }  # fmt: skip
    return shake(OpenClip(EMBED, vision, text, quick_gelu=quick_gelu))


class Archive(nn.Module):
    """Parameters under given names, for a TorchScript archive like OpenAI's."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        inner: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            head, _, rest = key.partition(".")
            if rest:
                inner.setdefault(head, {})[rest] = value
            else:
                self.register_buffer(head, value)
        for name, tensors in inner.items():
            self.add_module(name, Archive(tensors))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("container", ["torchscript", "plain"])
def test_openai_file(tmp_path: Path, container: str) -> None:
    reference = native()
    state = {key: value.half() for key, value in reference.state_dict().items()}  # as theirs
    reference.load_state_dict(state)
    sizes = {"input_resolution": 64, "context_length": LENGTH, "vocab_size": VOCABULARY}
    state |= {name: torch.tensor(value) for name, value in sizes.items()}
    path = tmp_path / "ViT-pico.pt"
    if container == "plain":
        torch.save(state, path)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.save(torch.jit.script(Archive(state)), path)
    asked = config(path, "vit_pico_patch16_clip_64")
    with torch.no_grad():
        tokens = captions()[0]
        assert_equal_towers(
            path, asked, reference.encode_image(pixels()), reference.encode_text(tokens)
        )
    built, (image, text) = build(asked, seed=0)
    # The file is OpenAI's, so it was trained with QuickGELU and CLIP's own statistics.
    assert built.config.image.name == "vit_pico_patch16_clip_quickgelu_64"
    assert built.config.image.activation == built.config.text.activation == "quick_gelu"
    assert built.config.image.mean == CLIP_MEAN
    assert set(image.dropped.values()) == {
        "belongs to the other tower", "fits only together with both of its towers"
    }  # fmt: skip
    assert {k for k, v in text.dropped.items() if "size" in v} == set(sizes)
    torch.testing.assert_close(built.logit_scale, reference.logit_scale.detach().float())
    assert image.trained.startswith("CLIP")
    assert image.architecture is not None
    assert image.architecture.dtype.startswith("float16")


def test_plain_gelu_for_a_quick_gelu_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ViT-pico.pt"
    torch.save(native().state_dict() | {"input_resolution": torch.tensor(64)}, path)
    with pytest.raises(RequestError, match=r"activation = 'gelu' contradicts.*quick_gelu"):
        build(config(path, "vit_pico_patch16_clip_64", activation="gelu"), seed=0)
    wrong = config(path, "vit_pico_patch16_clip_64", mean=(0.5, 0.5, 0.5))
    with pytest.raises(RequestError, match=r"model\.image\.mean.*0\.48145466"):
        build(wrong, seed=0)


def test_open_clip_native(tmp_path: Path) -> None:
    reference = native(quick_gelu=False)
    path = tmp_path / "epoch_3.pt"
    wrapped = {f"module.{key}": value for key, value in reference.state_dict().items()}
    torch.save({"epoch": 3, "name": "run", "state_dict": wrapped}, path)
    with torch.no_grad():
        image, text = reference.encode_image(pixels()), reference.encode_text(captions()[0])
    assert_equal_towers(path, config(path, "vit_pico_patch16_clip_64"), image, text)


@pytest.mark.parametrize("tower", ["timm", "native"])
def test_open_clip_two_towers(tmp_path: Path, tower: str) -> None:
    name = "vit_pico_patch16_clip_64"
    text_cfg = {
        "context_length": LENGTH, "vocab_size": VOCABULARY, "width": WIDTH, "heads": 1, "layers": 2,
    }  # fmt: skip
    vision = {"timm_model_name": name, "timm_pool": "", "timm_proj": "linear", "image_size": 64}
    if tower == "native":
        vision = {"image_size": 64, "patch_size": 16, "width": WIDTH, "layers": 2}
    reference = shake(CustomTextCLIP(EMBED, vision, text_cfg))
    path = tmp_path / "open_clip_model.pt"
    torch.save(reference.state_dict(), path)
    with torch.no_grad():
        image, text = reference.encode_image(pixels()), reference.encode_text(captions()[0])
    assert_equal_towers(path, config(path, name), image, text)


def clip_model(folder: Path, shard: str = "5GB") -> tuple[Tensor, Tensor]:
    """Save a transformers CLIPModel; returns its embeddings."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    small = {
        "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2,
        "num_attention_heads": 1,
    }  # fmt: skip
    text = small | {
        "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "bos_token_id": 1,
        "eos_token_id": VOCABULARY - 1, "pad_token_id": 0,
    }  # fmt: skip
    vision = small | {"image_size": 64, "patch_size": 16}
    model = shake(
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=EMBED))
    )
    model.save_pretrained(folder, max_shard_size=shard)
    CLIPImageProcessor().save_pretrained(folder)
    with torch.no_grad():
        out = model(input_ids=captions()[0], pixel_values=pixels())
    return out.image_embeds, out.text_embeds


@pytest.mark.parametrize("container", ["whole", "shards", "pytorch_model.bin"])
def test_transformers_clip(tmp_path: Path, container: str) -> None:
    image, text = clip_model(tmp_path, "100KB" if container == "shards" else "5GB")
    if container == "shards":
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
        assert not (tmp_path / "model.safetensors").exists()
    if container == "pytorch_model.bin":
        from safetensors.torch import load_file

        state = load_file(tmp_path / "model.safetensors")
        # Older transformers wrote these too.
        positions = {
            f"{t}_model.embeddings.position_ids": torch.arange(4) for t in ("text", "vision")
        }
        torch.save(state | positions, tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    asked = config(tmp_path, "vit_pico_patch16_clip_64")
    assert_equal_towers(tmp_path, asked, image, text)
    built, matches = build(asked, seed=0)
    assert built.config.image.activation == built.config.text.activation == "quick_gelu"
    assert built.config.image.mean == pytest.approx(CLIP_MEAN)
    derived = {key for match in matches for key in match.derived}
    assert len(derived) == (2 if container == "pytorch_model.bin" else 0)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    clip_model(tmp_path, "100KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(RequestError, match=re.escape(gone.name)):
        build(config(tmp_path, "vit_pico_patch16_clip_64"), seed=0)


def siglip(path: Path, **text: object) -> Model:
    tower = ImageTower(
        name="vit_pico_patch16_siglip_64", image_size=64, head="none", weights=str(path)
    )
    words = ClipText(
        family="siglip", width=WIDTH, layers=2, heads=2, context_length=LENGTH,
        vocab_size=VOCABULARY, weights=str(path), **text,  # type: ignore[arg-type]
    )  # fmt: skip
    return Model(image=tower, text=words, embed_dim=WIDTH)


def test_transformers_siglip(tmp_path: Path) -> None:
    from transformers import SiglipConfig, SiglipModel

    small = {
        "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }  # fmt: skip
    text = small | {
        "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "projection_size": WIDTH,
        "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1,
    }  # fmt: skip
    vision = small | {"image_size": 64, "patch_size": 16}
    reference = shake(SiglipModel(SiglipConfig(text_config=text, vision_config=vision)))
    reference.save_pretrained(tmp_path)
    tokens, lengths = captions()
    full = tokens.clone()
    for row, length in enumerate(lengths):
        full[row, length:] = 1
    with torch.no_grad():
        out = reference(input_ids=full, pixel_values=pixels())
        built, matches = build(siglip(tmp_path), seed=0)
        built.eval()
        assert_same(built.visual(images()), out.image_embeds)
        # Trimmed to the longest of a batch: the tower itself fills up to the full length.
        assert_same(
            built.text(tokens[:, :5], lengths.clamp(max=5))[[0, 2]], out.text_embeds[[0, 2]]
        )
        assert_same(built.text(tokens, lengths), out.text_embeds)
    assert built.config.image.activation == built.config.text.activation == "gelu_tanh"
    assert built.config.text.pad_id == 1
    assert all(match.share == 1.0 and not match.new for match in matches)
    assert matches[0].trained.startswith("SigLIP")
    assert matches[1].dropped["logit_bias"].startswith("of the sigmoid loss")
    with pytest.raises(RequestError, match="family = 'clip' contradicts"):
        build(config(tmp_path, "vit_pico_patch16_siglip_64"), seed=0)


def test_open_clip_siglip_on_timm(tmp_path: Path) -> None:
    vision = {
        "timm_model_name": "vit_pico_patch16_siglip_64", "timm_pool": "map", "timm_proj": "none",
        "image_size": 64,
    }  # fmt: skip
    text = {
        "context_length": LENGTH, "vocab_size": VOCABULARY, "width": WIDTH, "heads": 2, "layers": 2,
        "no_causal_mask": True, "proj_bias": True, "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
    }  # fmt: skip
    reference = shake(CustomTextCLIP(WIDTH, vision, text, init_logit_bias=-10))
    path = tmp_path / "siglip.pt"
    torch.save(reference.state_dict(), path)
    tokens, lengths = captions()
    full = tokens.clone()
    for row, length in enumerate(lengths):
        full[row, length:] = 1
    with torch.no_grad():
        image, text = reference.encode_image(pixels()), reference.encode_text(full)
    assert_equal_towers(path, siglip(path), image, text)


# EVA: timm has the forward; the names of the original files are made here, independently.


def rope_tables(grid: int, reference: int, head_dim: int) -> dict[str, Tensor]:
    """github.com/baaivision/EVA, rope.py: angles of a row and a column, each channel twice."""
    steps = torch.arange(grid) / grid * reference
    quarter = head_dim // 2
    frequencies = 1.0 / 10000 ** (torch.arange(0, quarter, 2)[: quarter // 2].float() / quarter)
    angles = (steps[:, None] * frequencies).repeat_interleave(2, dim=-1)
    rows, columns = angles[:, None].expand(-1, grid, -1), angles[None].expand(grid, -1, -1)
    both = torch.cat([rows, columns], dim=-1).view(grid * grid, -1)
    return {"rope.freqs_cos": both.cos(), "rope.freqs_sin": both.sin()}


def original_names(state: dict[str, Tensor], split: bool) -> dict[str, Tensor]:
    swaps = {"attn.norm.": "attn.inner_attn_ln.", "mlp.norm.": "mlp.ffn_ln."}
    if split:
        swaps |= {
            "mlp.fc1_g.": "mlp.w1.", "mlp.fc1_x.": "mlp.w2.", "mlp.fc2.": "mlp.w3.",
            "q_proj.bias": "q_bias", "v_proj.bias": "v_bias",
        }  # fmt: skip
    else:
        swaps |= {"mlp.fc1.": "mlp.w12.", "mlp.fc2.": "mlp.w3."}
    renamed = {}
    for key, value in state.items():
        for old, new in swaps.items():
            key = key.replace(old, new)
        renamed[key] = value
    return renamed


def eva_file(path: Path, name: str, *, kind: str, seed: int = 4) -> Tensor:
    """Write what EVA's authors would have; returns timm's own embeddings of it."""
    masked = kind == "mim"
    classes = 0 if masked else EMBED
    model = shake(timm.create_model(name, num_classes=classes, global_pool="token"), seed)
    state = dict(model.state_dict())
    if name.startswith("eva02"):
        state = original_names(state, split="fused" not in name)
        tables = rope_tables(4, 4 if "ref4" in name else 8, WIDTH // 2)
        torch.testing.assert_close(
            torch.cat([tables["rope.freqs_sin"], tables["rope.freqs_cos"]], -1),
            model.rope.get_embed((4, 4)),
        )
        state |= tables | {f"blocks.{i}.attn.{k}": v for i in (0, 1) for k, v in tables.items()}
    if masked:
        state |= {
            "mask_token": torch.randn(1, 1, WIDTH), "lm_head.weight": torch.randn(24, WIDTH),
            "lm_head.bias": torch.randn(24),
        }  # fmt: skip
        torch.save({"model": state, "epoch": 1}, path)
    else:
        text = native().state_dict()
        state = {f"visual.{key}": value for key, value in state.items()}
        state |= {
            f"text.{k}": v for k, v in text.items() if not k.startswith(("visual.", "logit"))
        } | {"logit_scale": torch.tensor(4.0)}
        torch.save(state, path)
    with torch.no_grad():
        return model(pixels())


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


# What does not fit is refused, with the keys that show it.


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


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", None])
def test_a_file_without_weights_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "weights.pt"
    if content is None:
        torch.save({"state_dict": {}}, path)
    else:
        path.write_bytes(content)
    message = refused(config(path, "vit_pico_patch16_clip_64"))
    assert str(path) in message


def test_our_own_checkpoint_folder(tmp_path: Path) -> None:
    """A checkpoint starts another run, and open_clip's `local-dir:` gives the same embeddings."""
    from pennyclip.checkpoint import save

    first = tmp_path / "ViT-pico.pt"
    torch.save(native().state_dict() | {"input_resolution": torch.tensor(64)}, first)
    model, _ = build(config(first, "vit_pico_patch16_clip_64"), seed=0)
    folder = save(tmp_path / "run", 1, None, model, {}, None, 1)
    again, matches = build(config(folder, "vit_pico_patch16_clip_64"), seed=9)
    assert again.config.image.activation == "quick_gelu"
    assert again.config.text.activation == "quick_gelu"
    assert matches[0].layout == "two towers (open_clip)"
    peer = open_clip.create_model(f"local-dir:{folder}").eval()
    with torch.no_grad():
        assert_same(again.eval().visual(images()), peer.encode_image(pixels()))
        assert_same(again.text(*captions()), peer.encode_text(captions()[0]))
    with pytest.raises(RequestError, match="contradicts"):
        build(config(folder, "vit_pico_patch16_clip_64", activation="gelu"), seed=9)
