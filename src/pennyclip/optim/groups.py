"""Named parameter groups: every trainable parameter in exactly one."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from pennyclip.config import Optim, PartRates

NO_DECAY_NAMES = ("cls_token", "pos_embed", "positional_embedding", "reg_token", "logit_")


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay belongs on a parameter: on matrices and kernels, not on vectors."""
    return parameter.ndim >= 2 and not any(part in name for part in NO_DECAY_NAMES)


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    trunks: Mapping[str, list[list[str]]],
    config: Optim,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, each with `name`, `part`, `params` and its peak `base_lr`.

    Args:
        parameters: named parameters of the model; those that do not learn are left out.
        trunks: for the parts `image` and `text`, the trunk's parameter names by layer, the input
            first. All other parameters form the part `heads`.
        config: rates and weight decays by part.

    Returns:
        Groups in the order of their first parameter. Layer decay gives layer l of n the rate
        lr * layer_decay^(n - 1 - l): closer to the output, a larger rate.
    """
    place = {
        name: (part, len(layers) - 1 - number)
        for part, layers in trunks.items()
        for number, names in enumerate(layers)
        for name in names
    }
    rates: dict[str, PartRates] = {
        "image": config.image,
        "text": config.text,
        "heads": config.heads,
    }
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        part, below = place.get(name, ("heads", 0))
        rate = rates[part]
        layered = rate.layer_decay != 1.0
        decay = decays(name, parameter)
        label = part + (f".{below}" if layered else "") + ("" if decay else ".no_decay")
        weight_decay = config.weight_decay if rate.weight_decay is None else rate.weight_decay
        group = groups.setdefault(
            label,
            {
                "name": label,
                "part": part,
                "params": [],
                "base_lr": (config.lr if rate.lr is None else rate.lr) * rate.layer_decay**below,
                "weight_decay": weight_decay if decay else 0.0,
            },
        )
        group["params"].append(parameter)
    return list(groups.values())
