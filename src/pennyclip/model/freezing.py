"""Which parameters learn, by tower and depth."""

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import Tensor, nn

from pennyclip.base.errors import RequestError, some_like
from pennyclip.config.keys import Depth
from pennyclip.model.clip import CLIP, TextTower
from pennyclip.model.image import ImageTower
from pennyclip.model.lora import is_adapter, merged_state


def freeze(model: CLIP, image_layers: Depth, text_layers: Depth) -> None:
    """Let the last layers of each trunk learn, and the heads and the temperature always.

    Of a trunk with adapters, the adapters in these layers learn.

    What is wholly frozen is put into evaluation mode: no dropout, stored statistics.

    Raises:
        RequestError: more layers are asked for than the trunk has, or layers without adapters.
    """
    model.train()
    for tower, depth, name in (
        (model.visual, image_layers, "image_layers"),
        (model.text, text_layers, "text_layers"),
    ):
        layers = tower.layers()
        learning = _learning(layers, depth, name)
        adapters = {parameter for names in layers for parameter in names if is_adapter(parameter)}
        if adapters:
            if learning and not learning & adapters:
                raise RequestError(
                    f"{name} = {depth}: there are no adapters in these layers, so nothing of the "
                    "trunk would learn. Take more layers, or other targets of lora."
                )
            learning &= adapters  # what they sit in stays as it is
        for parameter in [parameter for names in layers for parameter in names]:
            tower.get_parameter(parameter).requires_grad_(parameter in learning)
        for module in tower.modules():
            parameters = list(module.parameters())
            if parameters and not any(p.requires_grad for p in parameters):
                module.eval()
    if model.config.image.weights is not None:
        # Pretrained BatchNorm keeps its stored statistics: a batch here is a poor estimate.
        for module in model.visual.trunk.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def _learning(layers: list[list[str]], depth: Depth, name: str) -> set[str]:
    """Names of the parameters that a depth lets learn."""
    if isinstance(depth, tuple):
        names = [parameter for layer in layers for parameter in layer]
        for pattern in depth:
            if not any(fnmatchcase(parameter, pattern) for parameter in names):
                raise RequestError(
                    f"{name}: nothing in this trunk matches '{pattern}'. Its parameters are called "
                    f"{some_like(pattern, names)} and so on"
                )
        return {n for n in names if any(fnmatchcase(n, pattern) for pattern in depth)}
    count = len(layers) if depth == "all" else 0 if depth == "none" else depth
    if not (isinstance(depth, str) or 1 <= count <= len(layers)):
        raise RequestError(
            f"{name} = {depth}: this tower has {len(layers)} layers. Take 1 to {len(layers)}, all, "
            "or none."
        )
    return {parameter for layer in layers[len(layers) - count :] for parameter in layer}


def frozen_layers(tower: ImageTower | TextTower) -> int:
    """How many of a trunk's layers, counted from the input, hold nothing that learns."""
    layers = tower.layers()
    learning = (any(tower.get_parameter(n).requires_grad for n in names) for names in layers)
    return next((number for number, learns in enumerate(learning) if learns), len(layers))


def trunk_state(tower: ImageTower | TextTower, layers: int | None = None) -> dict[str, Tensor]:
    """All that a trunk's output depends on: the tower's state without the head.

    Args:
        layers: only what the output of the first so many layers depends on; None: of all.
    """
    state = {k: v for k, v in merged_state(tower).items() if not k.startswith(tower.head_names)}
    if layers is not None:
        # A buffer (stored statistics) belongs to the layer of the parameters in its module.
        later = {_merged(name) for names in tower.layers()[layers:] for name in names}
        modules = {name.rpartition(".")[0] for name in later}
        parameters = {_merged(name) for name, _ in tower.named_parameters()}
        for name in list(state):
            if name in later or (name not in parameters and name.rpartition(".")[0] in modules):
                del state[name]
    return state


def _merged(name: str) -> str:
    """A parameter's name in `merged_state`."""
    return name.replace(".base_layer.", ".")


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
