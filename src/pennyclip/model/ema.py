"""An exponential moving average of the weights, kept in float32 beside the model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pennyclip.model.clip import CLIP


class Ema:
    """Averages what learns: average = decay * average + (1 - decay) * weight, once an update.

    In the first updates the decay is lower, (1 + n) / (10 + n), so that the random start is soon
    forgotten (TensorFlow's `ExponentialMovingAverage`). Batches from which no update was made don't
    count.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.average: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: CLIP) -> None:
        """Take the weights after one more update into the average."""
        learning = _averaged(model)
        for name, value in learning.items():
            held = self.average.get(name)
            if held is None or held.shape != value.shape:  # new, or resampled
                self.average[name] = value.detach().float().clone()
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages = [self.average[name] for name in learning]
        values = [value.detach().float() for value in learning.values()]
        torch._foreach_lerp_(averages, values, 1 - decay)
        self.updates += 1

    @contextmanager
    @torch.no_grad()
    def applied(self, model: CLIP) -> Iterator[None]:
        """The model with averaged weights inside, and with its own afterwards.

        What is frozen now keeps its own: it is what stored features were made with.
        """
        state = model.state_dict()
        swapped = {
            name: value
            for name in _averaged(model)
            if (value := self.average.get(name)) is not None and state[name].shape == value.shape
        }
        own = {name: state[name].clone() for name in swapped}
        for name, value in swapped.items():
            state[name].copy_(value)
        try:
            yield
        finally:
            for name, value in own.items():
                state[name].copy_(value)

    def state(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": self.average}

    def load(self, state: Mapping[str, Any], model: CLIP) -> None:
        """Go on from `state`, on the model's device."""
        device = model.logit_scale.device
        self.updates = state["updates"]
        self.average = {name: value.to(device) for name, value in state["average"].items()}


def _averaged(model: CLIP) -> dict[str, Tensor]:
    """Parameters that learn, and the statistics of what is in training mode."""
    found: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for prefix, module in model.named_modules():
        if module.training:
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                    found[f"{prefix}.{name}"] = buffer
    return found
