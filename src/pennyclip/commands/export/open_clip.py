"""A folder that open_clip loads through `local-dir:`.

Towers shaped like CLIP's own are written under open_clip's native names, which every version of it
and many other tools read. All others keep the checkpoint's names (open_clip's `CustomTextCLIP`).
"""

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from pennyclip.base.errors import RequestError
from pennyclip.commands.export.names import renamed, without_batch
from pennyclip.commands.export.probe import TEXTS, captions
from pennyclip.commands.export.vit import Unlike, ViT, as_vit
from pennyclip.commands.export.written import FOLDER, Source, Written
from pennyclip.config.keys import ClipText
from pennyclip.evaluation.encoder import make_tokenizer
from pennyclip.model.clip import CLIP
from pennyclip.model.text_clip import NORM_EPS, ClipTextTower
from pennyclip.weights.checkpoint import TEXT_FILES, write_json
from pennyclip.weights.layouts import NATIVE_IMAGE, NATIVE_TEXT
from pennyclip.weights.open_clip import (
    TRUNK,
    open_clip_config,
    open_clip_files,
    trunk_arguments,
)

Names = Literal["native", "two towers"]


def write(source: Source, folder: Path, names: Names | None = None) -> Written:
    """Write a model for open_clip.

    Args:
        source: what to write.
        folder: an empty folder.
        names: unset: native where the towers allow it.

    Raises:
        RequestError: native names were asked for, and the towers are not CLIP's own; or open_clip
            would feed the model other tokens.
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
    files = open_clip_files(model, source.checkpoint)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if vit is not None:
        config = open_clip_config(model)
        files = {
            "open_clip_config.json": {
                **config,
                "model_cfg": _native_config(vit, config["model_cfg"]),
            }
        }
        rules = (*NATIVE_IMAGE, *NATIVE_TEXT)  # the last rule of the texts fits any name
        scale = {"logit_scale": state.pop("logit_scale")}
        state = renamed(without_batch(state), rules) | scale
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for name in TEXT_FILES:
        if (source.checkpoint / name).is_file():
            shutil.copyfile(source.checkpoint / name, folder / name)
    for name, tree in files.items():
        write_json(folder / name, tree)
    notes = []
    arguments = {} if vit is not None else trunk_arguments(model.visual)
    if arguments:
        told = ", ".join(f"{key} {value}" for key, value in arguments.items())
        notes.append(f"The image tower is not timm's default ({told}): {TRUNK}/ tells open_clip.")
    if vit is None:  # so that pennyclip opens it again too
        shutil.copyfile(source.checkpoint / "meta.json", folder / "meta.json")
    text = model.config.text
    own_tokens = isinstance(text, ClipText) and text.tokenizer is not None
    if own_tokens:
        _check_tokenizer(source, folder)
    beside = bool(arguments) or own_tokens or not isinstance(text, ClipText)
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


def _check_tokenizer(source: Source, folder: Path) -> None:
    """Compare the ids that open_clip's tokenizer makes of captions with ours.

    Raises:
        RequestError: they differ, or transformers, which it needs, is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise RequestError(
            "open_clip reads this model's tokenizer with the package transformers, which is not "
            "installed. Install it with: pip install 'pennyclip[hf]'"
        ) from error
    model = source.model
    tokens, lengths = captions(make_tokenizer(model.config, source.checkpoint))
    length = model.text.context_length
    found = AutoTokenizer.from_pretrained(folder)(
        list(TEXTS), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    real = torch.arange(length) < lengths[:, None]
    expected = F.pad(tokens, (0, length - tokens.shape[1]))
    if isinstance(model.text, ClipTextTower) and model.text.pad_id is not None:
        expected = expected.masked_fill(~real, model.text.pad_id)  # SigLIP's tower reads it
        real = torch.ones_like(real)
    if not torch.equal(found[real], expected[real]):
        raise RequestError(
            f"open_clip would feed this model other tokens than pennyclip: its tokenizer makes "
            f"{found[0].tolist()} of '{TEXTS[0]}', and expected are {expected[0].tolist()}. Is "
            "the padding token in tokenizer_config.json the model's (model.text.pad_id)? Export "
            "with --to onnx instead, where lengths say what is padding."
        )
