"""Named parameter groups: every trainable parameter in exactly one."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from pennyclip.base.errors import RequestError, some_like
from pennyclip.config.keys import Optim, PartRates, TrunkRates

NO_DECAY_NAMES = ("cls_token", "pos_embed", "positional_embedding", "reg_token", "logit_")
TEMPERATURE = ("logit_scale", "logit_bias")


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay belongs on a parameter: on matrices and kernels, not on vectors."""
    return parameter.ndim >= 2 and not any(part in name for part in NO_DECAY_NAMES)


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    trunks: Mapping[str, list[list[str]]],
    config: Optim,
    new: Collection[str] = (),
    new_factor: float = 1.0,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer.

    Args:
        parameters: named parameters of the model; those that do not learn are left out.
        trunks: for the parts `image` and `text`, the trunk's parameter names by layer, the input
            first. The logits' scale and bias are the part `temperature`, all others `heads`.
        config: rates and weight decays by part, and by pattern.
        new: names of parameters that learn for the first time.
        new_factor: multiplies their rates.

    Returns:
        Groups in the order of their first parameter, each with `name`, `part`, `params`, `lr` and
        `base_lr` (both the peak rate), `weight_decay`, `betas` and `warmup` (updates, or None for
        the run's). Layer decay gives layer l of n the rate lr * layer_decay^(n - 1 - l): closer to
        the output, a larger rate.

    Raises:
        RequestError: a pattern matches no parameter of the model, learning or not.
    """
    named = list(parameters)
    _check_patterns([name for name, _ in named], config)
    place = {
        name: (part, len(layers) - 1 - number)
        for part, layers in trunks.items()
        for number, names in enumerate(layers)
        for name in names
    }
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        part, below = place.get(name, ("temperature" if name in TEMPERATURE else "heads", 0))
        group = _rates(name, part, below, decays(name, parameter), config)
        if name in new and new_factor != 1.0:
            group["name"] += ".new"
            group["base_lr"] *= new_factor
        group = groups.setdefault(group["name"], {"params": [], **group, "lr": group["base_lr"]})
        group["params"].append(parameter)
    return list(groups.values())


def _rates(name: str, part: str, below: int, decay: bool, config: Optim) -> dict[str, Any]:
    """What a parameter learns with: its pattern's word, else its part's, else the optimizer's."""
    rates: PartRates = getattr(config, part)
    lr = config.lr if rates.lr is None else rates.lr
    weight_decay = config.weight_decay if rates.weight_decay is None else rates.weight_decay
    betas = rates.betas or config.betas
    layer_decay = rates.layer_decay if isinstance(rates, TrunkRates) else 1.0
    label = f"{part}.{below}" if layer_decay != 1.0 else part
    base_lr = lr * layer_decay**below
    pattern = next((p for p in config.patterns if fnmatchcase(name, p.match)), None)
    if pattern is not None:
        label = f"{label} {pattern.match}"
        base_lr = base_lr if pattern.lr is None else pattern.lr
        weight_decay = weight_decay if pattern.weight_decay is None else pattern.weight_decay
        betas = pattern.betas or betas
    return {
        "name": label if decay else f"{label}.no_decay",
        "part": part,
        "base_lr": base_lr,
        "weight_decay": weight_decay if decay else 0.0,
        "betas": betas,
        "warmup": rates.warmup_steps,
    }


def _check_patterns(names: list[str], config: Optim) -> None:
    for number, pattern in enumerate(config.patterns):
        earlier = config.patterns[:number]
        left = [n for n in names if not any(fnmatchcase(n, p.match) for p in earlier)]
        if not any(fnmatchcase(name, pattern.match) for name in left):
            raise RequestError(
                f"optim.patterns[{number}]: no parameter is left that matches '{pattern.match}'. "
                f"Similar names: {some_like(pattern.match, names)}"
            )
