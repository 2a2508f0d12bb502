"""Build a model and start it from the weights that its recipe names."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from pennyclip.config import Model, TransformersText
from pennyclip.errors import RequestError
from pennyclip.model.clip import CLIP
from pennyclip.weights.match import Match, Rule, load_matching
from pennyclip.weights.packages import locate, packaged

# Kept by older transformers versions, recomputed by the model.
POSITION_IDS = Rule(r"(.*\.)?position_ids", None, "counted, not learned")
POOLER = Rule(r"pooler\..+", None, "a pooling layer that CLIP does not use")


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file, unwrapped from `state_dict`, `model` or `module`.

    Raises:
        RequestError: the file cannot be read as safetensors or as a plain PyTorch file.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RequestError(
            f"{path} cannot be read as weights ({type(error).__name__}: {error}). Expected "
            "safetensors, or a PyTorch file that holds tensors only."
        ) from error
    for wrapper in ("state_dict", "model", "module"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise RequestError(f"{path} holds no tensors")
    return tensors


def text_folder(config: Model) -> Path | None:
    """Where the configuration and tokenizer of a transformers text tower lie."""
    return locate(config.text.name) if isinstance(config.text, TransformersText) else None


def build(config: Model, seed: int) -> tuple[CLIP, list[Match]]:
    """The model that a recipe describes, at the start of its training.

    Args:
        config: the towers, and the weights that they start from.
        seed: of what is not loaded.

    Returns:
        The model in float32, and a report for each file that was loaded.

    Raises:
        RequestError: a file is missing or does not fit its tower.
    """
    torch.manual_seed(seed)
    folder = text_folder(config)
    model = CLIP(config, folder)
    matches = []
    if config.image.weights is not None:
        package = packaged(config.image.weights)
        path = locate(config.image.weights)
        layout = package.layout if package else ()
        matches.append(
            load_matching(model.visual.trunk, read_state(path), layout, "image tower", path.name)
        )
    if isinstance(config.text, TransformersText) and config.text.pretrained:
        assert folder is not None
        path = folder / "model.safetensors"
        matches.append(
            load_matching(
                model.text.transformer, read_state(path), (POSITION_IDS, POOLER), "text tower",
                f"{config.text.name}/{path.name}",
            )
        )
    for match in matches:
        match.check()
    return model, matches
