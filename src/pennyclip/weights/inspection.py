"""`pennyclip weights FILE --tower NAME`: would these weights fit that tower, and how?"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ClipText, ImageTower, Model, TransformersText
from pennyclip.model.clip import CLIP
from pennyclip.weights.describe import CLASSES
from pennyclip.weights.layouts import Tower, matching, recognise
from pennyclip.weights.load import load_tower
from pennyclip.weights.packages import locate, packaged
from pennyclip.weights.read import WeightsFile, read_weights
from pennyclip.weights.statements import (
    read_statements,
    resolve_image,
    resolve_text,
    unsaid_activation,
)
from pennyclip.weights.table import render

CLIP_TEXT = "clip-text"
HEAD_DIM = 64  # channels of an attention head in every published CLIP text tower


def inspect_weights(file: str, tower: str) -> tuple[str, dict[str, Any]]:
    """The match report, without memory for the tower: it is built of shapes only.

    Args:
        file: a path, `package:NAME` or `hub:org/name`.
        tower: a timm model's name; `clip-text` for CLIP's text transformer, in the file's own
            size; or a transformers encoder: a folder, `package:NAME` or `hub:org/name`.

    Returns:
        The report as text and as a tree, whose `fits` says whether a training would accept it.

    Raises:
        RequestError: the file cannot be read, or there is no such tower.
    """
    source = read_weights(locate(file))
    said = read_statements(source)
    package = packaged(file)
    kind: Tower = "text" if _is_text(tower) else "image"
    text: ClipText | TransformersText = ClipText(width=HEAD_DIM, layers=1, heads=1)
    image = ImageTower(name="vit_tiny_patch16_224")
    width = 512
    folder = note = None
    if kind == "image":
        note = unsaid_activation(ImageTower(name=tower), said, source)
        image = resolve_image(ImageTower(name=tower), said, source.name)
        width, image = _head(source, image)
    elif tower == CLIP_TEXT:
        text, width = _clip_text(source)
        if said.text_heads:
            text = replace(text, heads=said.text_heads)
        note = unsaid_activation(text, said, source)
        text = resolve_text(text, said, source.name)
    else:
        folder = locate(tower)
        text = TransformersText(name=tower)
    with torch.device("meta"):
        model = CLIP(Model(image=image, text=text, embed_dim=width), folder)
    layout = package.layout if package else None
    match = load_tower(model, kind, source, said=said, layout=layout, note=note)
    ending = "These weights fit the tower." if match.fits else "These weights do not fit the tower."
    tree = match.tree()
    stated: dict[str, Any] = {
        "activation": said.image_activation if kind == "image" else said.text_activation,
        "pool": said.image_pool if kind == "image" else said.text_pool,
    }
    if kind == "image":
        stated |= {"mean": said.mean, "std": said.std}
    else:
        stated |= {"family": said.text_family, "heads": said.text_heads}
    says = ", ".join(f"{name} {value}" for name, value in stated.items() if value is not None)
    lines = [render(match), f"it says: {says or 'nothing about how to use it'}", ending]
    return "\n".join(lines), tree | {"says": stated}


def _is_text(tower: str) -> bool:
    reference = tower.startswith(("package:", "hub:"))
    return tower == CLIP_TEXT or reference or (Path(tower) / "config.json").is_file()


def _named(source: WeightsFile, tower: Tower) -> dict[str, Tensor]:
    """The file's tensors under our names, as far as the layout has names for them."""
    rules = recognise(source.state, tower).rules
    return {
        name: value
        for key, value in source.state.items()
        for rule, name in matching(key, rules, ())
        if name
        for value in [value.T if rule.transpose else value]
    }


def _head(source: WeightsFile, image: ImageTower) -> tuple[int, ImageTower]:
    """The embedding width and the kind of head that a file brings, else 512 and a linear one."""
    named = _named(source, "image")
    if (mlp := named.get("visual.head.mlp.fc2.weight")) is not None:
        bias = "visual.head.mlp.fc2.bias" in named
        return mlp.shape[0], replace(image, head="mlp", head_bias=bias)
    head = named.get("visual.head.proj.weight")
    if head is None:
        pooled = named.get("visual.trunk.attn_pool.latent")
        if pooled is not None:  # SigLIP's: what attention pools is the embedding
            return pooled.shape[-1], replace(image, head="none")
        return 512, image
    if head.shape[0] in CLASSES:
        return 512, image
    return head.shape[0], replace(image, head_bias="visual.head.proj.bias" in named)


def _clip_text(source: WeightsFile) -> tuple[ClipText, int]:
    """The text tower whose sizes the file's tensors have."""
    named = _named(source, "text")
    tokens = named.get("text.token_embedding.weight")
    positions = named.get("text.positional_embedding")
    if tokens is None or positions is None:
        raise RequestError(
            f"{source.name} holds no CLIP text tower: expected token and position embeddings "
            f"under the names of OpenAI, open_clip or transformers, found keys like "
            f"{', '.join(list(source.state)[:4])}"
        )
    layers = [int(m[1]) for n in named if (m := re.search(r"resblocks\.(\d+)\.", n))]
    siglip = named.get("text.text_projection.weight")
    head = named.get("text.text_projection") if siglip is None else siglip.T
    vocabulary, width = tokens.shape
    config = ClipText(
        family="clip" if siglip is None else "siglip",
        width=width,
        layers=max(layers, default=-1) + 1,
        heads=max(1, width // HEAD_DIM),
        context_length=positions.shape[-2],
        vocab_size=vocabulary,
    )
    return config, 512 if head is None else head.shape[1]
