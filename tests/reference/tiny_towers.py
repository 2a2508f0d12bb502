"""The references' own models, scaled down, with random weights: what the layout tests load."""

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from open_clip.model import CLIP as OpenClip
from timm.models import generate_default_cfgs, register_model
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pennyclip.config.keys import ClipText, ImageTower, Model
from pennyclip.weights.build import build
from pennyclip.weights.match import Match
from pennyclip.weights.read import read_weights

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
WIDTH, EMBED, VOCABULARY, LENGTH = 64, 32, 120, 12
CLIP_VIT = {
    "img_size": 64, "patch_size": 16, "embed_dim": WIDTH, "depth": 2, "num_heads": 1,
    "pre_norm": True, "norm_layer": nn.LayerNorm,
}  # fmt: skip
PLAIN_VIT = {"img_size": 64, "patch_size": 16, "embed_dim": WIDTH, "depth": 2, "num_heads": 1}
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
    "vit_pico_patch16_64": (VisionTransformer, PLAIN_VIT),
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


def assert_all_accounted(match: Match, path: Path) -> None:
    """Every key of the file has exactly one fate, and none is left over."""
    fates = [*match.matched, *match.resampled, *match.derived, *match.dropped]
    assert sorted(fates) == sorted(read_weights(path).state)
    assert not match.left_over
    assert not match.missing


@torch.no_grad()
def assert_equal_towers(path: Path, model: Model, image: Tensor, text: Tensor | None) -> None:
    """Load, account for every key, compare the embeddings."""
    built, matches = build(model, seed=3)
    built.eval()
    for match in matches:
        assert match.share == 1.0
        assert not match.new
        assert_all_accounted(match, path)
    assert_same(built.visual(images()), image)
    if text is not None:
        assert_same(built.text(*captions()), text)


def native(quick_gelu: bool = True) -> OpenClip:
    vision = {"image_size": 64, "patch_size": 16, "width": WIDTH, "layers": 2, "head_width": 64}
    text = {
        "context_length": LENGTH, "vocab_size": VOCABULARY, "width": WIDTH, "heads": 1, "layers": 2,
    }  # fmt: skip
    return shake(OpenClip(EMBED, vision, text, quick_gelu=quick_gelu))


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
