"""Which parameters learn, by tower and depth."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from pennyclip.config import Depth
from pennyclip.errors import RequestError
from pennyclip.model.clip import CLIP, TextTower
from pennyclip.model.image import ImageTower


def freeze(model: CLIP, image_layers: Depth, text_layers: Depth) -> None:
    """Let the last layers of each trunk learn, and the heads and the temperature always.

    What is wholly frozen is put into evaluation mode: no dropout, stored statistics.

    Raises:
        RequestError: more layers are asked for than the trunk has.
    """
    model.train()
    for tower, depth, name in (
        (model.visual, image_layers, "image_layers"),
        (model.text, text_layers, "text_layers"),
    ):
        layers = tower.layers()
        learning = len(layers) if depth == "all" else 0 if depth == "none" else depth
        if not 0 <= learning <= len(layers):
            raise RequestError(f"{name} = {depth}: this tower has {len(layers)} layers")
        for number, names in enumerate(layers):
            for parameter in names:
                learns = number >= len(layers) - learning
                tower.get_parameter(parameter).requires_grad_(learns)
        for module in tower.modules():
            parameters = list(module.parameters())
            if parameters and not any(p.requires_grad for p in parameters):
                module.eval()
    if model.config.image.weights is not None:
        # Pretrained BatchNorm keeps its stored statistics: a batch here is a poor estimate.
        for module in model.visual.trunk.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def trunk_state(tower: ImageTower | TextTower) -> dict[str, Tensor]:
    """All that a tower's `features` depend on: its state without the head."""
    heads = ("head.", "proj.", "text_projection")
    return {k: v for k, v in tower.state_dict().items() if not k.startswith(heads)}


@contextmanager
def evaluating(model: CLIP) -> Iterator[None]:
    """Evaluation mode inside, and afterwards for each module the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
