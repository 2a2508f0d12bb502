"""Build a model and start it from the weights that its recipe names."""

from dataclasses import replace
from pathlib import Path

import torch

from pennyclip.config.keys import ClipText, Model, TransformersText
from pennyclip.model.clip import CLIP
from pennyclip.weights.load import load_tower
from pennyclip.weights.match import Match
from pennyclip.weights.packages import locate, packaged
from pennyclip.weights.read import WeightsFile, read_weights
from pennyclip.weights.statements import (
    Statements,
    read_statements,
    resolve_image,
    resolve_text,
    unsaid_activation,
)


def text_folder(config: Model) -> Path | None:
    """Where the tokenizer of a text tower lies, and of a transformers one its configuration.

    None: CLIP's own tower with CLIP's own tokenizer.
    """
    if isinstance(config.text, TransformersText):
        return locate(config.text.name, "model.text.name")
    tokenizer = config.text.tokenizer
    return locate(tokenizer, "model.text.tokenizer") if tokenizer else None


def text_weights(config: Model) -> str | None:
    """The reference of what the text tower starts from; None: random weights."""
    text = config.text
    if isinstance(text, TransformersText) and text.weights is None and text.pretrained:
        return text.name
    return text.weights


def build(
    config: Model, seed: int, logit_scale: float = 1 / 0.07, logit_bias: float = 0.0
) -> tuple[CLIP, list[Match]]:
    """The model that a recipe describes, at the start of its training.

    What the recipe leaves open and the weights settle (activation, mean and standard deviation,
    pooling, text padding) stands in the model's own `config`, which travels with its checkpoints.

    Args:
        config: the towers, and the weights that they start from.
        seed: of what is not loaded.
        logit_scale: factor between cosines and logits at the start, unless a file brings its own.
        logit_bias: added to the logits at the start, likewise.

    Returns:
        The model in float32, and a report for each tower that was loaded.

    Raises:
        RequestError: a file is missing, does not fit its tower, or says otherwise than the recipe.
    """
    torch.manual_seed(seed)
    image_reference, text_reference = config.image.weights, text_weights(config)
    files: dict[str, tuple[WeightsFile, Statements]] = {}
    text_key = "name" if config.text.weights is None else "weights"
    for reference, key in (
        (image_reference, "model.image.weights"),
        (text_reference, f"model.text.{text_key}"),
    ):
        if reference is not None and reference not in files:
            file = read_weights(locate(reference, key))
            if reference == getattr(config.text, "name", None):
                file = replace(file, name=f"{reference}/{file.path.name}")
            files[reference] = (file, read_statements(file))
    asked = config
    if image_reference is not None:
        file, said = files[image_reference]
        config = replace(config, image=resolve_image(config.image, said, file.name))
    if text_reference is not None:
        file, said = files[text_reference]
        config = replace(config, text=resolve_text(config.text, said, file.name))
    elif isinstance(config.text, ClipText):
        config = replace(config, text=resolve_text(config.text, Statements(), ""))

    model = CLIP(config, text_folder(config) if isinstance(config.text, TransformersText) else None)
    model.start_logits(logit_scale, logit_bias)
    matches = []
    if image_reference is not None:
        file, said = files[image_reference]
        package = packaged(image_reference)
        matches.append(
            load_tower(
                model,
                "image",
                file,
                said=said,
                layout=package.layout if package else None,
                drop_keys=config.image.drop_keys,
                new_keys=config.image.new_keys,
                note=unsaid_activation(asked.image, said, file),
            )
        )
    if text_reference is not None:
        file, said = files[text_reference]
        matches.append(
            load_tower(
                model,
                "text",
                file,
                said=said,
                drop_keys=config.text.drop_keys,
                new_keys=config.text.new_keys,
                with_temperature=text_reference == image_reference,
                note=unsaid_activation(asked.text, said, file),
            )
        )
    for match in matches:
        match.check()
    return model, matches
