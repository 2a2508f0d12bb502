"""The gradient by layer of each tower: its norm at every update, its mean where asked for.

Norms cost next to nothing: clipping needs those of all tensors anyway, and what is added up here
are a few hundred numbers, read in the one wait for the device that an update has. Means are a pass
over all gradients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from pennyclip.model.clip import CLIP


class LayerGradients:
    """Which layer each parameter belongs to that learns."""

    def __init__(self, model: CLIP, optimizer: torch.optim.Optimizer) -> None:
        """
        Args:
            model: its trunks' `layers()` are the layers; heads and the temperature are others.
            optimizer: its parameters are those that learn; gradients come in their order.
        """
        layer_of, order = _layers(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._learning = [p for group in optimizer.param_groups for p in group["params"]]
        found = [layer_of[names[id(parameter)]] for parameter in self._learning]
        self.names = [name for name in order if name in set(found)]
        """The layers in which something learns: those of the image tower, then the text tower's,
        each from the input on."""
        self._place = torch.tensor([self.names.index(name) for name in found])
        counts = torch.tensor([float(p.numel()) for p in self._learning])
        self._counts = self._by_layer(counts)

    def norms(self, tensors: Float[Tensor, " P"]) -> Float[Tensor, " L"]:
        """By layer, from the norms of all gradients (`tensor_norms`)."""
        return self._by_layer(tensors.square()).sqrt()

    def metrics(self, record: Mapping[str, Any], clip_norm: float) -> dict[str, dict[str, float]]:
        """`grad_norms` and `grad_means` by layer, for metrics.jsonl. Waits for the device.

        Args:
            record: of the update that was just made, or skipped: then there are no means.
            clip_norm: to which it was clipped. Both are of the gradient before.
        """
        means = {} if record["skipped"] else self._means()
        clipped = min(1.0, clip_norm / (record["grad_norm"] + 1e-6))  # as torch has it
        found = {
            "grad_norms": record["grad_norms"],
            "grad_means": {layer: mean / clipped for layer, mean in means.items()},
        }
        return {
            name: {layer: float(f"{value:.4g}") for layer, value in values.items()}
            for name, values in found.items()
        }

    @torch.no_grad()
    def _means(self) -> dict[str, float]:
        gradients = [p.grad for p in self._learning if p.grad is not None]
        sums = _whole(torch.stack([_local(g).sum().float() for g in gradients]), gradients)
        means = self._by_layer(sums) / self._counts.to(sums.device)
        return dict(zip(self.names, means.tolist(), strict=True))

    def _by_layer(self, values: Float[Tensor, " P"]) -> Float[Tensor, " L"]:
        if self._place.device != values.device:
            self._place = self._place.to(values.device)
        return values.new_zeros(len(self.names)).index_add_(0, self._place, values)


@torch.no_grad()
def tensor_norms(gradients: Sequence[Tensor]) -> Float[Tensor, " P"]:
    """The norm of each gradient; of sharded ones, over all ranks, which takes one message."""
    norms = torch.stack(torch._foreach_norm([_local(g) for g in gradients]))
    if not any(isinstance(g, DTensor) for g in gradients):
        return norms
    return _whole(norms.square(), gradients).sqrt()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(sums: Float[Tensor, " P"], gradients: Sequence[Tensor]) -> Float[Tensor, " P"]:
    """Sums over each gradient's part on this rank, made sums over the whole.

    Gradients may be sharded over one mesh, or be the same on each of its ranks.
    """
    sharded = [
        isinstance(g, DTensor) and any(isinstance(p, Shard) for p in g.placements)
        for g in gradients
    ]
    if not any(sharded):
        return sums
    first = gradients[sharded.index(True)]
    assert isinstance(first, DTensor)
    at = torch.tensor(sharded, device=sums.device)
    whole = sums.clone()
    for dimension, placement in enumerate(first.placements):
        if isinstance(placement, Shard):
            dist.all_reduce(whole, group=first.device_mesh.get_group(dimension))
    return torch.where(at, whole, sums)


def _layers(model: CLIP) -> tuple[dict[str, str], list[str]]:
    """The layer of every parameter, and all layers in order."""
    names = [name for name, _ in model.named_parameters()]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layer_of: dict[str, str] = {}
    order: list[str] = []
    for tower, layers in (("visual", model.visual.layers()), ("text", model.text.layers())):
        own = [[f"{tower}.{name}" for name in layer] for layer in layers]
        trunk = {name for layer in own for name in layer}
        for layer in own:
            label = _label(max(layer, key=lambda name: sizes[name]), set(layer), names)
            layer_of |= dict.fromkeys(layer, label)
            order.append(label)
        head = [name for name in names if name.startswith(f"{tower}.") and name not in trunk]
        if head:
            label = _label(max(head, key=lambda name: sizes[name]), set(head), names)
            layer_of |= dict.fromkeys(head, label)
            order.append(label)
    for name in names:
        if name not in layer_of:
            layer_of[name] = name
            order.append(name)
    return layer_of, order


def _label(largest: str, layer: set[str], names: list[str]) -> str:
    """A layer's name: of the outermost module with its largest tensor and nothing of others."""
    parts = largest.split(".")
    for end in range(1, len(parts)):
        prefix = ".".join(parts[:end]) + "."
        if all(name in layer for name in names if name.startswith(prefix)):
            return prefix[:-1]
    return largest
