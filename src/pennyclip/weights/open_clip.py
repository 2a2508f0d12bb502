"""Our models in open_clip's terms: the files that its `local-dir:` reads.

open_clip builds a timm trunk as timm does by default; where ours differs (image size, activation,
pooling), a timm configuration in `trunk/` says so. It is found from the working folder only, as are
a transformers text tower and a tokenizer of its own: then the folder loads where it is the working
folder.
"""

from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch

from pennyclip.config.keys import Activation, ClipText
from pennyclip.data.text import JsonTokenizer
from pennyclip.model.activation import activation_of
from pennyclip.model.clip import CLIP
from pennyclip.model.image import ImageTower
from pennyclip.model.text_clip import NORM_EPS

POOLERS = {"mean": "mean_pooler", "cls": "cls_last_hidden_state_pooler"}
SIGLIP_TEXT = {
    "no_causal_mask": True,
    "proj_bias": True,
    "pool_type": "last",
    "norm_kwargs": {"eps": NORM_EPS["siglip"]},
}
TRUNK = "trunk"


def open_clip_files(model: CLIP, text_folder: Path | None) -> dict[str, dict[str, Any]]:
    """What open_clip needs to build the same model and feed it the same pixels and tokens.

    Args:
        model: its towers are described.
        text_folder: where the tokenizer of a text tower lies that has not CLIP's own.

    Returns:
        Path in the folder -> content of the JSON file.
    """
    config = open_clip_config(model)
    text = model.config.text
    if isinstance(text, ClipText) and text.tokenizer is not None:
        config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "."
        if text.family == "clip":  # else it takes the highest id for the end token, as CLIP's is
            assert text_folder is not None, "a tokenizer of its own lies in a folder"
            end = JsonTokenizer(text_folder, text.context_length).encode("")[-1]
            config["model_cfg"]["text_cfg"] |= {"pool_type": "eos", "eos_id": end}
    arguments = trunk_arguments(model.visual)
    if not arguments:
        return {"open_clip_config.json": config}
    config["model_cfg"]["vision_cfg"]["timm_model_name"] = f"local-dir:{TRUNK}"
    return {
        "open_clip_config.json": config,
        f"{TRUNK}/config.json": _timm_config(model.visual, arguments),
    }


def open_clip_config(model: CLIP) -> dict[str, Any]:
    """The model and its preprocessing, but for what timm's trunk of this name is not by default.

    A transformers text tower is named ".", which open_clip resolves in the working folder.
    """
    config = model.config
    text: dict[str, Any]
    # Without a head of its own, open_clip passes the pooling on as it is, empty too.
    pool = config.image.pool or ""
    if config.image.head == "none":
        pool = pool or getattr(model.visual.trunk, "global_pool", "")
    if isinstance(config.text, ClipText):
        text = {
            "context_length": config.text.context_length,
            "vocab_size": config.text.vocab_size,
            "width": config.text.width,
            "heads": config.text.heads,
            "layers": config.text.layers,
        }
        if config.text.activation == "gelu_tanh":
            text["act_kwargs"] = {"approximate": "tanh"}
        if config.text.family == "siglip":
            text |= SIGLIP_TEXT
    else:
        text = {
            "hf_model_name": ".",
            "hf_tokenizer_name": ".",
            "hf_proj_type": config.text.head,
            "hf_pooler_type": POOLERS[config.text.pool],
            "hf_model_pretrained": False,
            "context_length": config.text.context_length,
        }
    bias = {"init_logit_bias": 0.0} if config.logit_bias else {}  # makes it own one
    return {
        "model_cfg": {
            "embed_dim": config.embed_dim,
            "quick_gelu": isinstance(config.text, ClipText)
            and config.text.activation == "quick_gelu",
            "vision_cfg": {
                "timm_model_name": config.image.name,
                "timm_model_pretrained": False,
                "timm_pool": pool,
                "timm_proj": config.image.head,
                "timm_proj_bias": config.image.head_bias,
                "image_size": config.image.image_size,
            },
            "text_cfg": text,
            "custom_text": True,
            **bias,
        },
        "preprocess_cfg": {
            "mean": [round(v / 255, 8) for v in model.visual.mean.flatten().tolist()],
            "std": [round(v / 255, 8) for v in model.visual.std.flatten().tolist()],
            "interpolation": "bicubic",
            "resize_mode": "shortest",
        },
    }


def trunk_arguments(tower: ImageTower) -> dict[str, Any]:
    """What timm must be told, beyond the model's name, to build the same trunk."""
    config = tower.config
    size, activation, pool, resizes = _timm_default(config.name)
    arguments: dict[str, Any] = {}
    if config.image_size != size and resizes:
        arguments["img_size"] = config.image_size
    if config.activation != activation:
        arguments["act_layer"] = config.activation
    if config.pool and config.pool != (pool or config.pool):
        arguments["global_pool"] = config.pool  # another pooling has its norm in another place
    return arguments


@cache
def _timm_default(name: str) -> tuple[int, Activation | None, str | None, bool]:
    """Image size, activation and pooling of timm's model, and whether it is built for a size."""
    with torch.device("meta"):
        default = timm.create_model(name, num_classes=0)
        size = default.pretrained_cfg["input_size"][-1]
        try:
            timm.create_model(name, num_classes=0, img_size=size)
            resizes = True
        except TypeError:  # a convolutional network: fits every size
            resizes = False
    return size, activation_of(default), getattr(default, "global_pool", None), resizes


def _timm_config(tower: ImageTower, arguments: dict[str, Any]) -> dict[str, Any]:
    """timm's own file for a model with arguments of its own."""
    return {
        "architecture": tower.config.name.split(".")[0],
        "num_classes": 0,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [3, tower.image_size, tower.image_size],
            "mean": list(tower.config.mean or ()),
            "std": list(tower.config.std or ()),
            "num_classes": 0,
        },
    }
