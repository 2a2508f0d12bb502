"""Which activation a timm trunk's MLPs use: QuickGELU and GELU look alike in the weights."""

from timm.layers import GELU, GELUTanh, Mlp
from timm.layers.activations import QuickGELU as TimmQuickGELU
from torch import nn

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Activation
from pennyclip.model.text_clip import ACTIVATIONS, QuickGELU


def activation_of(trunk: nn.Module) -> Activation | None:
    """The activation of the MLPs; None where there are none, or of another kind (SwiGLU)."""
    for module in trunk.modules():
        if isinstance(module, Mlp):
            return _name(module.act)
    return None


def set_activation(trunk: nn.Module, name: Activation) -> None:
    """Give all MLPs of a trunk another activation.

    Raises:
        RequestError: it has no MLP whose activation could be chosen.
    """
    found = activation_of(trunk)
    if found is None:
        raise RequestError(
            f"model.image.activation = {name}: this trunk ({type(trunk).__name__}) has no plain "
            "MLP whose activation could be chosen. Leave the key out."
        )
    if found != name:
        for module in trunk.modules():
            if isinstance(module, Mlp):
                module.act = ACTIVATIONS[name]()


def _name(module: nn.Module) -> Activation | None:
    if isinstance(module, QuickGELU | TimmQuickGELU):
        return "quick_gelu"
    if isinstance(module, GELUTanh):
        return "gelu_tanh"
    if isinstance(module, nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return "gelu" if isinstance(module, GELU) else None
