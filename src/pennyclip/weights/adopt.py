"""The model that somebody else's folder describes, to be built and filled by `build`.

    open_clip_config.json     open_clip's CLIP and CustomTextCLIP, timm trunks among them
    config.json               transformers' CLIPModel and SiglipModel

Activations, means, pooling and padding are not repeated here: `statements.py` reads them.
"""

import re
from pathlib import Path
from typing import Any, Literal, cast

import timm
import torch

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ClipText, ImageTower, Model, TransformersText
from pennyclip.data.text import ClipTokenizer, JsonTokenizer
from pennyclip.weights.open_clip import SIGLIP_TEXT
from pennyclip.weights.read import read_json

# What transformers leaves out of a config.json where it is the default (CLIPVisionConfig,
# CLIPTextConfig, SiglipVisionConfig and SiglipTextConfig of transformers 5).
COMMON_VISION = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
VISION = {
    "clip": {**COMMON_VISION, "intermediate_size": 3072, "patch_size": 32, "image_size": 224},
    "siglip": {**COMMON_VISION, "intermediate_size": 3072, "patch_size": 16, "image_size": 224},
}
TEXT = {
    "clip": {
        **{"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8},
        **{"vocab_size": 49408, "max_position_embeddings": 77},
    },
    "siglip": {
        **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"vocab_size": 32000, "max_position_embeddings": 64},
    },
}
SIZES = (
    "patch_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
POOLERS: dict[str, Literal["mean", "cls"]] = {
    "mean_pooler": "mean",
    "cls_last_hidden_state_pooler": "cls",
}
# open_clip's keys that are understood here, or change nothing in use. Others change what the same
# tensors compute, or what tokens they see.
VISION_KEYS = {
    *("image_size", "patch_size", "width", "layers", "head_width", "mlp_ratio", "act_kwargs"),
    *("timm_model_name", "timm_model_pretrained", "timm_pool", "timm_proj", "timm_proj_bias"),
    *("timm_drop", "timm_drop_path", "patch_dropout", "output_tokens"),
}
TEXT_KEYS = {
    *("context_length", "vocab_size", "width", "heads", "layers", "act_kwargs", "output_tokens"),
    *("hf_model_name", "hf_tokenizer_name", "hf_proj_type", "hf_pooler_type"),
    *("hf_model_pretrained", "pad_id", "eos_id"),
}
DEFAULTS = {"pool_type": ("tok", "argmax", "eos")}  # of both towers
PROBE = "A photo of two cats, 1984!"


def adoptable(folder: Path) -> bool:
    """Whether there is a model of somebody else's in a folder."""
    return any((folder / name).is_file() for name in ("open_clip_config.json", "config.json"))


def adopt(folder: Path) -> Model:
    """What to build for the weights in a folder of open_clip's or transformers'.

    Raises:
        RequestError: it is of a kind that has no counterpart here.
    """
    if (folder / "open_clip_config.json").is_file():
        tree = read_json(folder / "open_clip_config.json")
        return _from_open_clip(folder, tree.get("model_cfg", {}))
    return _from_transformers(folder, read_json(folder / "config.json"))


def _from_open_clip(folder: Path, tree: dict[str, Any]) -> Model:
    if "vision_cfg" not in tree or "text_cfg" not in tree or "multimodal_cfg" in tree:
        raise RequestError(
            f"{folder}/open_clip_config.json describes no plain CLIP: expected vision_cfg and "
            f"text_cfg alone, found {', '.join(tree) or 'nothing'}."
        )
    vision, text = tree["vision_cfg"], tree["text_cfg"]
    siglip = SIGLIP_TEXT if text.get("no_causal_mask") else {}
    _check_keys(folder, "vision_cfg", vision, VISION_KEYS, {})
    _check_keys(folder, "text_cfg", text, TEXT_KEYS, siglip)
    weights = str(folder)
    if (name := vision.get("timm_model_name")) is not None:
        if not timm.is_model(name):
            raise RequestError(
                f"{folder}/open_clip_config.json: timm {timm.__version__} has no model '{name}'."
            )
        image = ImageTower(
            name=name,
            image_size=vision.get("image_size", 224),
            pool=_pool(folder, vision.get("timm_pool", "avg")),
            head=vision.get("timm_proj", "linear") or "none",
            head_bias=vision.get("timm_proj_bias", False),
            weights=weights,
        )
    else:
        if not isinstance(vision.get("layers", 12), int):
            raise RequestError(
                f"{folder}/open_clip_config.json: its image tower has layers = "
                f"{vision.get('layers')}, which is a ResNet under open_clip's own names; no "
                "tower here reads those."
            )
        width, size = vision.get("width", 768), vision.get("image_size", 224)
        heads, hidden = width // vision.get("head_width", 64), vision.get("mlp_ratio", 4.0) * width
        sizes = (vision.get("patch_size", 16), width, vision.get("layers", 12), heads, int(hidden))
        name = _timm_name("clip", size, sizes)
        image = ImageTower(name=name, image_size=size, pool="token", weights=weights)
    return Model(
        image=image,
        text=_open_clip_text(folder, text),
        embed_dim=tree["embed_dim"],
        logit_bias="init_logit_bias" in tree,
    )


def _check_keys(
    folder: Path, part: str, tree: dict[str, Any], known: set[str], values: dict[str, Any]
) -> None:
    """Refuse what would change the model, and is not built here.

    Args:
        known: keys that may have any value.
        values: keys that may have this value.
    """
    odd = {
        key: value
        for key, value in tree.items()
        if key not in known
        and value not in (None, False, 0, {})
        and value != values.get(key)
        and value not in DEFAULTS.get(key, ())
    }
    if odd:
        raise RequestError(
            f"{folder}/open_clip_config.json: {part} has {odd}, which no tower here does."
        )


def _pool(folder: Path, name: str) -> Literal["token", "avg", "map"] | None:
    if name not in ("", "token", "avg", "map"):
        raise RequestError(
            f"{folder}/open_clip_config.json: timm_pool is '{name}'; image towers here pool by "
            "token, avg or map."
        )
    return cast(Literal["token", "avg", "map"], name) if name else None


def _open_clip_text(folder: Path, text: dict[str, Any]) -> ClipText | TransformersText:
    length, weights = text.get("context_length", 77), str(folder)
    if (name := text.get("hf_model_name")) is not None:
        pooler = text.get("hf_pooler_type", "mean_pooler")
        if pooler not in POOLERS:
            raise RequestError(
                f"{folder}/open_clip_config.json: hf_pooler_type is '{pooler}', and a text tower "
                f"here pools as one of {', '.join(POOLERS)} does."
            )
        return TransformersText(
            name=_reference(folder, name, "config.json"),
            pool=POOLERS[pooler],
            head=text.get("hf_proj_type", "mlp"),
            context_length=length,
            weights=weights,
        )
    tokenizer = text.get("hf_tokenizer_name")
    return ClipText(
        family="siglip" if text.get("no_causal_mask") else "clip",
        width=text.get("width", 512),
        layers=text.get("layers", 12),
        heads=text.get("heads", 8),
        context_length=length,
        vocab_size=text.get("vocab_size", 49408),
        tokenizer=_reference(folder, tokenizer, "tokenizer.json") if tokenizer else None,
        weights=weights,
    )


def _reference(folder: Path, name: str, file: str) -> str:
    """Where open_clip would look for a part: in the folder itself, or on the hub."""
    return str(folder) if name == "." or (folder / file).is_file() else f"hub:{name}"


def _from_transformers(folder: Path, tree: dict[str, Any]) -> Model:
    kind = tree.get("model_type")
    if kind not in VISION:
        raise RequestError(
            f"{folder}/config.json: model_type is '{kind}'. Read here are {', '.join(VISION)}, "
            "open_clip's folders (open_clip_config.json) and pennyclip's runs."
        )
    vision = VISION[kind] | tree.get("vision_config", {})
    text = TEXT[kind] | tree.get("text_config", {})
    name = _timm_name(kind, vision["image_size"], tuple(vision[key] for key in SIZES))
    clip, weights = kind == "clip", str(folder)
    return Model(
        image=ImageTower(
            name=name,
            image_size=vision["image_size"],
            pool="token" if clip else "map",
            head="linear" if clip else "none",
            weights=weights,
        ),
        text=ClipText(
            family="clip" if clip else "siglip",
            width=text["hidden_size"],
            layers=text["num_hidden_layers"],
            heads=text["num_attention_heads"],
            context_length=text["max_position_embeddings"],
            vocab_size=text["vocab_size"],
            tokenizer=None if clip and _clip_tokens(folder) else weights,
            weights=weights,
        ),
        embed_dim=tree.get("projection_dim", 512) if clip else vision["hidden_size"],
        logit_bias=not clip,
    )


def _clip_tokens(folder: Path) -> bool:
    """Whether a folder's tokenizer is CLIP's own, or there is none that says otherwise."""
    if not (folder / "tokenizer.json").is_file():
        return True
    return JsonTokenizer(folder, 77).encode(PROBE) == ClipTokenizer(77).encode(PROBE)


def _timm_name(kind: str, size: int, sizes: tuple[int, ...]) -> str:
    """timm's model of these sizes, if possible the one that was made for the image size.

    Args:
        kind: clip or siglip, as timm's names say it.
        size: of the images.
        sizes: of a patch, width, layers, heads, width inside the MLPs.

    Raises:
        RequestError: timm has none.
    """
    names = [
        name
        for name in timm.list_models(f"vit_*_patch{sizes[0]}_*{kind}_*")
        if not re.search("quickgelu|_gap_", name)  # the same sizes, other functions
    ]
    for name in sorted(names, key=lambda name: (not name.endswith(f"_{size}"), name)):
        with torch.device("meta"):
            trunk = timm.create_model(name, num_classes=0)
        block = trunk.blocks[0]
        found = (trunk.embed_dim, len(trunk.blocks), block.attn.num_heads)
        if (sizes[0], *found, block.mlp.fc1.out_features) == sizes:
            return name
    raise RequestError(
        f"timm {timm.__version__} has no '{kind}' vision transformer with patches of {sizes[0]} "
        f"pixels, width {sizes[1]}, {sizes[2]} layers, {sizes[3]} heads and MLPs of width "
        f"{sizes[4]}, so this model cannot be built."
    )
