"""An optimizer's state by parameter name: it survives regrouping, freezing and restarts."""

from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, dict[str, Any]]


def read_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> State:
    """The state of every parameter that has one. Tensors are shared, not copied."""
    names = _names(model)
    return {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}


def write_state(optimizer: torch.optim.Optimizer, model: nn.Module, state: State) -> None:
    """Give each of the optimizer's parameters the state that stands under its name, if any."""
    names = _names(model)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = state.get(names[parameter], {})
            shapes = {v.shape for v in found.values() if torch.is_tensor(v) and v.ndim}
            if found and shapes <= {parameter.shape}:  # else it was resampled, and starts anew
                optimizer.state[parameter] = {
                    key: value.to(parameter.device) if torch.is_tensor(value) else value
                    for key, value in found.items()
                }


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}
