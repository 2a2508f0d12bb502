"""What weights say about how they must be used, beyond their tensors.

QuickGELU or GELU, the input's mean and standard deviation, pooling, text padding: none of it shows
in a wrong result at once, all of it costs accuracy. A recipe that leaves such a key unset takes it
from the weights; one that contradicts them is refused.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import timm
import torch

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Activation, ClipText, ImageTower, TransformersText
from pennyclip.model.activation import activation_of
from pennyclip.weights.describe import norm_order_of
from pennyclip.weights.read import WeightsFile

T = TypeVar("T")
Pool = Literal["token", "avg", "map"]
Statistics = tuple[float, float, float]

# Of the images that OpenAI trained on: github.com/openai/CLIP, clip/clip.py.
CLIP_MEAN: Statistics = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Statistics = (0.26862954, 0.26130258, 0.27577711)
SAME = 1e-3  # chosen: mean and std may differ by a quarter of one of 255 grey levels
MASKED = "masked image modelling"
ACTIVATIONS: dict[str, Activation] = {  # transformers' names
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
TEXT_HEADS = {"clip": 8, "siglip": 12}  # transformers' own, which its config.json may leave out


@dataclass(frozen=True)
class Statements:
    """What one file or folder says. None: nothing."""

    image_activation: Activation | None = None
    text_activation: Activation | None = None
    mean: Statistics | None = None
    std: Statistics | None = None
    image_pool: Pool | None = None
    norm_order: Literal["pre", "post"] | None = None
    """Of the image tower's blocks: EVA-02-CLIP-E/14 norms behind them, and no key shows it."""
    text_heads: int | None = None
    """Attention heads of a CLIP text tower: any number that divides its width fits by shape."""
    text_pool: str | None = None
    text_family: str | None = None
    pad_id: int | None = None
    trained: str = "not said"
    """What the weights have been trained for, as far as it can be told."""


def read_statements(file: WeightsFile) -> Statements:
    """Everything that a file's keys, and the configurations beside it, say."""
    said = _from_keys(file)
    for found in (
        _from_transformers(file.json("config.json")),
        _from_timm(file.json("config.json")),
        _from_preprocessor(file.json("preprocessor_config.json")),
        _from_open_clip(file.json("open_clip_config.json")),
        _from_pennyclip(file.json("meta.json")),
        _from_sentence_transformers(file),
    ):
        said = replace(said, **found)
    return said


def _from_keys(file: WeightsFile) -> Statements:
    keys = file.state.keys()

    def has(pattern: str) -> bool:
        return any(re.search(pattern, key) for key in keys)

    said: dict[str, Any] = {}
    if "input_resolution" in keys and "visual.conv1.weight" in keys:  # OpenAI's own files only
        said = {
            "image_activation": "quick_gelu",
            "text_activation": "quick_gelu",
            "mean": CLIP_MEAN,
            "std": CLIP_STD,
        }
        if "ln_final.weight" in keys:  # clip/model.py, build_model: 64 channels a head
            said["text_heads"] = max(1, file.state["ln_final.weight"].shape[0] // 64)
    if "eva02_clip_e_" in file.name.lower():  # EVA02_CLIP_E_psz14, as its authors named it
        said["norm_order"] = "post"
    siglip = has(r"(^|\.)logit_bias$|text_model\.head\.|text_projection\.bias$")
    contrastive = siglip or has(r"^(module\.)?logit_scale$|^visual\.proj$|_projection\.weight$")
    named = re.search(r"merged2b|[_-]clip|siglip", file.name.lower()) is not None
    embedding_head = has(r"inner_attn_ln|attn\.norm\.") and has(r"(^|\.)head\.weight$")
    masked = has(r"(^|\.)(mask_token|lm_head\.)")
    if siglip:
        said["trained"] = "SigLIP (image-text pairs)"
    elif contrastive or embedding_head or (named and not masked):
        said["trained"] = "CLIP (image-text pairs)"
    elif masked:
        said["trained"] = MASKED
    if has(r"text_projection\.bias$|text_model\.head\.bias$"):
        said["text_family"] = "siglip"
    elif has(r"(^|\.)text_projection(\.weight)?$"):
        said["text_family"] = "clip"
    if has(r"(^|\.)fc_norm\."):
        said["image_pool"] = "avg"
    elif has(r"attn_pool\.|vision_model\.head\."):
        said["image_pool"] = "map"
    elif has(r"cls_token$|(visual|embeddings)\.class_embedding$") and contrastive and not masked:
        said["image_pool"] = "token"
    return Statements(**said)


def _from_transformers(config: dict[str, Any]) -> dict[str, Any]:
    kind = config.get("model_type")
    if kind == "vision-text-dual-encoder":
        return _from_dual_encoder(config)
    if kind not in ("clip", "siglip"):
        return {}
    default = "quick_gelu" if kind == "clip" else "gelu_pytorch_tanh"  # transformers' own
    return {
        "image_activation": _hidden_act(config, "vision_config", default),
        "text_activation": _hidden_act(config, "text_config", default),
        "text_family": kind,
        "text_heads": _heads(config, kind),
        "pad_id": config.get("text_config", {}).get("pad_token_id", 1),
    }


def _from_dual_encoder(config: dict[str, Any]) -> dict[str, Any]:
    image, text = (
        config.get(f"{part}_config", {}).get("model_type") for part in ("vision", "text")
    )
    default = "quick_gelu" if image == "clip_vision_model" else "gelu"  # ViT's
    said: dict[str, Any] = {"image_activation": _hidden_act(config, "vision_config", default)}
    if text != "clip_text_model":
        return said | {"text_pool": "cls"}
    activation = _hidden_act(config, "text_config", "quick_gelu")
    return said | {
        "text_activation": activation,
        "text_family": "clip",
        "text_heads": _heads(config, "clip"),
    }


def _heads(config: dict[str, Any], kind: str) -> Any:
    return config.get("text_config", {}).get("num_attention_heads", TEXT_HEADS[kind])


def _hidden_act(config: dict[str, Any], part: str, default: str) -> Activation:
    name = config.get(part, {}).get("hidden_act", default)
    if name not in ACTIVATIONS:
        raise RequestError(
            f"config.json: {part}.hidden_act is '{name}', which no tower here has. Known: "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _from_timm(config: dict[str, Any]) -> dict[str, Any]:
    if "architecture" not in config:
        return {}
    given = config.get("pretrained_cfg", {})
    name = f"{config['architecture']}.{given.get('tag', '')}"
    said = _statistics(given) | _timm_facts(config["architecture"])
    if config.get("global_pool") in ("token", "avg", "map"):
        said["image_pool"] = config["global_pool"]
    if re.search(r"merged2b|clip|siglip", name):
        said["trained"] = f"CLIP (image-text pairs; {name})"
    elif ".mim_" in name and "_ft_" not in name:
        said["trained"] = MASKED
    return said


def _from_preprocessor(config: dict[str, Any]) -> dict[str, Any]:
    return _statistics({key: config.get(f"image_{key}") for key in ("mean", "std")})


def _from_open_clip(config: dict[str, Any]) -> dict[str, Any]:
    model = config.get("model_cfg", {})
    image, text = model.get("vision_cfg", {}), model.get("text_cfg", {})
    if not model:
        return {}
    said = _statistics(config.get("preprocess_cfg", {}))
    native: Activation = "quick_gelu" if model.get("quick_gelu") else "gelu"

    def activation(part: dict[str, Any]) -> Activation:
        return (
            "gelu_tanh" if (part.get("act_kwargs") or {}).get("approximate") == "tanh" else native
        )

    if "timm_model_name" in image:
        said |= _timm_facts(image["timm_model_name"])
        if image.get("timm_pool") in ("token", "avg", "map"):
            said["image_pool"] = image["timm_pool"]
    else:
        said["image_activation"] = activation(image)
    if "hf_model_name" in text:
        poolers = {"mean_pooler": "mean", "cls_last_hidden_state_pooler": "cls"}
        if text.get("hf_pooler_type") in poolers:
            said["text_pool"] = poolers[text["hf_pooler_type"]]
    else:
        said["text_activation"] = activation(text)
        said["text_family"] = "siglip" if text.get("no_causal_mask") else "clip"
        said["text_heads"] = text.get("heads", 8)  # open_clip's default
    return said


def _from_pennyclip(meta: dict[str, Any]) -> dict[str, Any]:
    image, text = (meta.get("model", {}).get(part, {}) for part in ("image", "text"))
    said = {
        "image_activation": image.get("activation"),
        "image_pool": image.get("pool"),
        "text_activation": text.get("activation"),
        "text_family": text.get("family"),
        "text_heads": text.get("heads"),
        "text_pool": text.get("pool"),
        "pad_id": text.get("pad_id"),
    }
    known = {key: value for key, value in said.items() if value is not None}
    return known | ({"trained": "CLIP (image-text pairs; pennyclip)"} if image else {})


def _from_sentence_transformers(file: WeightsFile) -> dict[str, Any]:
    pooling = file.json("1_Pooling/config.json")
    for name, pool in (("mean", "mean"), ("cls", "cls")):
        if pooling.get(f"pooling_mode_{name}_token{'s' if name == 'mean' else ''}"):
            return {"text_pool": pool}
    return {"text_pool": pooling["pooling_mode"]} if "pooling_mode" in pooling else {}


def _statistics(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(tree[key]) for key in ("mean", "std") if tree.get(key)}


def _timm_facts(name: str) -> dict[str, Any]:
    if not timm.is_model(name):
        return {}
    with torch.device("meta"):
        trunk = timm.create_model(name, num_classes=0)
    found = activation_of(trunk)
    return {"norm_order": norm_order_of(trunk)} | ({"image_activation": found} if found else {})


def resolve_image(config: ImageTower, said: Statements, file: str) -> ImageTower:
    """The tower's configuration with what its weights say filled in.

    Raises:
        RequestError: the recipe contradicts the weights.
    """
    named: Activation | None = "quick_gelu" if "quickgelu" in config.name else None
    where, key = f"the weights {file}", "model.image"
    activation: Activation | None = agree(
        f"{key}.activation", config.activation or named, said.image_activation, where
    )
    pool: Pool | None = agree(f"{key}.pool", config.pool, said.image_pool, where)
    mean = agree(f"{key}.mean", config.mean, said.mean, where)
    std = agree(f"{key}.std", config.std, said.std, where)
    name = config.name
    if activation == "quick_gelu" and named is None:
        # timm's name then says it too, and with it every tool that builds the tower by name.
        variant = name.replace("_clip_", "_clip_quickgelu_")
        name = variant if timm.is_model(variant) else name
    return replace(config, name=name, activation=activation, pool=pool, mean=mean, std=std)


def resolve_text(
    config: ClipText | TransformersText, said: Statements, file: str
) -> ClipText | TransformersText:
    """The text tower's configuration with what its weights say filled in.

    Raises:
        RequestError: the recipe contradicts the weights.
    """
    where, key = f"the weights {file}", "model.text"
    if isinstance(config, TransformersText):
        agree(f"{key}.pool", config.pool, said.text_pool, where)
        return config
    agree(f"{key}.family", config.family, said.text_family, where)
    if said.text_heads not in (None, config.heads):
        raise RequestError(
            f"{key}.heads = {config.heads} contradicts {where}, which have {said.text_heads}. The "
            "tensors fit any number of heads, and another one computes something else: set "
            f"{key}.heads = {said.text_heads}."
        )
    activation: Activation | None = agree(
        f"{key}.activation", config.activation, said.text_activation, where
    )
    pad_id = config.pad_id
    if config.family == "siglip":
        pad_id = agree(f"{key}.pad_id", config.pad_id, said.pad_id, where)
    return replace(config, activation=activation or "gelu", pad_id=pad_id)


def unsaid_activation(
    config: ImageTower | ClipText | TransformersText, said: Statements, file: WeightsFile
) -> str | None:
    """A note where neither the recipe nor a CLIP's weights name the activation: gelu is a guess.

    Args:
        config: of the tower, as the recipe has it, before the weights fill it in.
    """
    if isinstance(config, TransformersText) or config.activation is not None:
        return None
    if isinstance(config, ClipText):
        part, known, siglip = "text", said.text_activation, config.family == "siglip"
        taken = "gelu"
    else:
        part, known, siglip = "image", said.image_activation, said.text_family == "siglip"
        clip = {"visual.conv1.weight", "vision_model.embeddings.patch_embedding.weight"}
        if "quickgelu" in config.name or clip.isdisjoint(file.state) or said.image_pool == "map":
            return None
        taken = str(_timm_facts(config.name).get("image_activation", "gelu"))
    if known is not None:
        return None
    usual = "SigLIP's have gelu_tanh" if siglip else "OpenAI's CLIPs have quick_gelu"
    return (
        f"{file.name} does not say which activation its {part} tower has, and {taken} is taken. "
        f"{usual}: model.{part}.activation sets it."
    )


def agree(key: str, asked: T | None, said: T | None, where: str) -> T | None:
    """What the recipe asks for where it does, else what the weights say.

    Raises:
        RequestError: both speak and differ.
    """
    if asked is None or said is None:
        return said if asked is None else asked
    same = asked == said
    if isinstance(asked, tuple) and isinstance(said, tuple):
        same = len(asked) == len(said) and all(
            abs(a - s) <= SAME for a, s in zip(asked, said, strict=True)
        )
    if not same:
        raise RequestError(
            f"{key} = {asked!r} contradicts {where}, which were trained with {said!r}. Leave the "
            f"key out to take it from the weights, or set it to {said!r}."
        )
    return asked
