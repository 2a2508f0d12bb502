"""A folder that open_clip loads through `local-dir:`.

Towers shaped like CLIP's own are written under open_clip's native names, which every version of it
and many other tools read. All others keep the checkpoint's names (open_clip's `CustomTextCLIP`).
open_clip builds a timm trunk as timm does by default; where ours differs (image size, activation,
pooling), a timm configuration in `trunk/` says so, and it is found from the working folder only.
"""

import shutil
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from safetensors.torch import save_file

from pennyclip.checkpoint import TEXT_FILES, write_json
from pennyclip.config import ClipText
from pennyclip.errors import RequestError
from pennyclip.export.names import renamed, without_batch
from pennyclip.export.vit import Unlike, ViT, as_vit
from pennyclip.export.written import FOLDER, Source, Written
from pennyclip.model.activation import activation_of
from pennyclip.model.clip import CLIP
from pennyclip.model.image import ImageTower
from pennyclip.model.text_clip import NORM_EPS
from pennyclip.weights.layouts import NATIVE_IMAGE, NATIVE_TEXT
from pennyclip.weights.open_clip import open_clip_config

TRUNK = "trunk"
Names = Literal["native", "two towers"]


def write(source: Source, folder: Path, names: Names | None = None) -> Written:
    """Write a model for open_clip.

    Args:
        source: what to write.
        folder: an empty folder.
        names: unset: native where the towers allow it.

    Raises:
        RequestError: native names were asked for, and the towers are not CLIP's own.
    """
    model = source.model
    try:
        vit = _native(model) if names != "two towers" else None
    except Unlike as reason:
        if names == "native":
            raise RequestError(
                f"this model cannot have open_clip's native names: {reason}. Leave names out."
            ) from reason
        vit = None
    config = open_clip_config(model)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if vit is not None:
        config["model_cfg"] = _native_config(vit, config["model_cfg"])
        rules = (*NATIVE_IMAGE, *NATIVE_TEXT)  # the last rule of the texts fits any name
        scale = {"logit_scale": state.pop("logit_scale")}
        state = renamed(without_batch(state), rules) | scale
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for name in TEXT_FILES:
        if (source.checkpoint / name).is_file():
            shutil.copyfile(source.checkpoint / name, folder / name)

    notes = []
    arguments = {} if vit is not None else _trunk_arguments(model.visual)
    if arguments:
        config["model_cfg"]["vision_cfg"]["timm_model_name"] = f"local-dir:{TRUNK}"
        (folder / TRUNK).mkdir()
        write_json(folder / TRUNK / "config.json", _timm_config(model.visual, arguments))
        told = ", ".join(f"{key} {value}" for key, value in arguments.items())
        notes.append(f"The image tower is not timm's default ({told}): {TRUNK}/ tells open_clip.")
    write_json(folder / "open_clip_config.json", config)
    if vit is None:  # so that pennyclip opens it again too
        shutil.copyfile(source.checkpoint / "meta.json", folder / "meta.json")
    beside = bool(arguments) or not isinstance(model.config.text, ClipText)
    if beside:
        notes.append(
            "open_clip looks for parts of this model in the working folder: load it from inside."
        )
    return Written(
        layout=f"open_clip, {'native' if vit is not None else 'two-tower'} names",
        python="import open_clip; model, _, preprocess = "
        f"open_clip.create_model_and_transforms('local-dir:{FOLDER}'); model.eval()",
        notes=tuple(notes),
        inside=beside,
    )


def _native(model: CLIP) -> ViT:
    """The image tower's sizes where both towers are what open_clip's own `CLIP` class builds."""
    vit, text = as_vit(model.visual, clip=True), model.config.text
    if not isinstance(text, ClipText) or text.family != "clip":
        raise Unlike("its text tower is not CLIP's causal transformer")
    if text.tokenizer is not None:
        raise Unlike("its text tower has a tokenizer of its own")
    if model.logit_bias is not None:
        raise Unlike("it has the sigmoid loss's bias")
    if vit.eps != NORM_EPS["clip"]:
        raise Unlike(f"its norms have an epsilon of {vit.eps}, CLIP's {NORM_EPS['clip']}")
    if vit.activation != (text.activation or "gelu"):
        raise Unlike(f"its activations differ: image {vit.activation}, text {text.activation}")
    return vit


def _native_config(vit: ViT, two_towers: dict[str, Any]) -> dict[str, Any]:
    text = two_towers["text_cfg"]
    vision = {
        "image_size": vit.image_size,
        "patch_size": vit.patch,
        "width": vit.width,
        "layers": vit.layers,
        "head_width": vit.width // vit.heads,
        "mlp_ratio": vit.hidden / vit.width,
    }
    if "act_kwargs" in text:
        vision["act_kwargs"] = text["act_kwargs"]
    return {
        "embed_dim": two_towers["embed_dim"],
        "quick_gelu": two_towers["quick_gelu"],
        "vision_cfg": vision,
        "text_cfg": text,
    }


def _trunk_arguments(tower: ImageTower) -> dict[str, Any]:
    """What timm must be told, beyond the model's name, to build the same trunk."""
    config = tower.config
    arguments: dict[str, Any] = {}
    with torch.device("meta"):
        default = timm.create_model(config.name, num_classes=0)
        if config.image_size != default.pretrained_cfg["input_size"][-1]:
            try:
                timm.create_model(config.name, num_classes=0, img_size=config.image_size)
                arguments["img_size"] = config.image_size
            except TypeError:
                pass  # a convolutional network: fits every size
    if config.activation != activation_of(default):
        arguments["act_layer"] = config.activation
    if config.pool and config.pool != getattr(default, "global_pool", config.pool):
        arguments["global_pool"] = config.pool  # another pooling has its norm in another place
    return arguments


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
