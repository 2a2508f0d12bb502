"""Low-rank adapters in a trunk's linear layers, built by peft (extra `lora`).

Hu et al. 2021 (arXiv 2106.09685), equation 3: h = W x + alpha / rank * B A x. W stays as it is, and
B starts at 0, so that an adapted model starts as the model that it was.

    timm trunks, transformers encoders    nn.Linear; a fused `attn.qkv` is one layer
    CLIP's text transformer               out_proj, c_fc, c_proj, and the fused `in_proj_weight`

Adapters exist in training only. Checkpoints hold merged weights, so that whoever loads one needs
neither peft nor knowledge of this file; what resuming needs beside them lies in trainer.pt.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Adapters, Lora
from pennyclip.model.clip import CLIP
from pennyclip.model.text_clip import CausalAttention

NAME = "default"  # peft's for the only adapter of a model; stands in the parameters' names
FUSED = "in_proj_weight"
SHOWN = 8  # layers that an error message lists. chosen: a screen


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter, not of the trunk that it sits in."""
    return f".lora_A.{NAME}." in name or f".lora_B.{NAME}." in name


def adapt(model: CLIP, config: Adapters, seed: int) -> list[str]:
    """Put adapters into the trunks of a model, in place.

    Args:
        model: with the weights that stay as they are.
        config: where adapters go, and of what kind.
        seed: of the adapters' A.

    Returns:
        A line about each adapted tower.

    Raises:
        RequestError: peft is missing, a number cannot be, or a tower has no such layers.
    """
    torch.manual_seed(seed)
    notes = []
    trunks: tuple[tuple[str, nn.Module, Lora], ...] = (
        ("image", model.visual.trunk, config.image),
        ("text", model.text.transformer, config.text),
    )
    for tower, trunk, lora in trunks:
        if lora.rank is not None:
            count = _inject(trunk, lora, lora.rank, f"lora.{tower}")
            learning = sum(p.numel() for n, p in trunk.named_parameters() if is_adapter(n))
            notes.append(
                f"lora: {count} layers of the {tower} trunk have adapters of rank {lora.rank}, "
                f"{learning:,} parameters; the trunk itself stays as it is"
            )
        elif lora != Lora():
            raise RequestError(
                f"lora.{tower} is set and has no rank, so there are no adapters. Set "
                f"lora.{tower}.rank, usually to 4 ... 32, or leave the table out."
            )
    return notes


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of a model or tower as if it had no adapters: what they add is in its weights."""
    layers = dict(_adapted(module))
    state = module.state_dict()
    if not layers:
        return state
    paths = sorted(layers, key=len, reverse=True)  # what is wrapped inside comes first

    def plain(name: str) -> str:
        for path in paths:
            if name.startswith(wrapped := f"{path}.base_layer."):
                name = f"{path}.{name.removeprefix(wrapped)}"
        return name

    merged = {plain(name): value for name, value in state.items() if not is_adapter(name)}
    with torch.no_grad():
        for path, layer in layers.items():
            name = plain(f"{path}.base_layer.{_parameter(layer)}")
            merged[name] = merged[name] + layer.get_delta_weight(NAME)
    return merged


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters, and the weights under them: with the merged state, all of an adapted model."""
    state = model.state_dict()
    under = {f"{path}.base_layer.{_parameter(layer)}" for path, layer in _adapted(model)}
    return {name: value for name, value in state.items() if name in under or is_adapter(name)}


def load_adapters(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give an adapted model, built from merged weights, what `adapter_state` has kept."""
    assert state.keys() == adapter_state(model).keys(), "of another request"
    model.load_state_dict(state, strict=False)


def _inject(root: nn.Module, lora: Lora, rank: int, where: str) -> int:
    """Wrap layers in `root`; returns how many."""
    alpha = rank if lora.alpha is None else lora.alpha
    if rank < 1 or not (alpha > 0 and math.isfinite(alpha)) or not 0 <= lora.dropout < 1:
        raise RequestError(
            f"{where}: expected a rank of at least 1, an alpha above 0 and a dropout of at least 0 "
            f"and below 1, found rank {rank}, alpha {alpha:g}, dropout {lora.dropout:g}"
        )
    layers = _targets(root, lora.targets, where)
    fused = [name for name in layers if name.endswith(FUSED)]
    if fused and lora.dropout:
        raise RequestError(
            f"{where}.dropout = {lora.dropout:g}: the query, key and value weights of this tower "
            f"are one parameter ({FUSED}), and what goes into it cannot be dropped for the adapter "
            f"alone. Set dropout to 0, or {where}.targets to layers without it."
        )
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise RequestError(
            f"{where}: adapters are built by peft, which is not installed. Install it with: pip "
            "install 'pennyclip[lora]'"
        ) from error
    for module in root.modules():
        if hasattr(module, "qkv_bias_separate"):
            # Some of timm's attentions (EVA, BEiT, Swin v2) take qkv's weight and go past qkv, and
            # past its adapter, unless told to add their bias separately.
            setattr(module, "qkv_bias_separate", True)  # noqa: B010, unknown to nn.Module
    peft = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=[name for name in layers if name not in fused],
        target_parameters=fused or None,
    )
    inject_adapter_in_model(peft, root, adapter_name=NAME)
    assert len(dict(_adapted(root))) == len(layers), "peft wrapped other layers than these"
    return len(layers)


def _targets(root: nn.Module, targets: tuple[str, ...], where: str) -> list[str]:
    """Names of the layers to wrap: those that end in a target, whole parts compared, as in peft."""
    found = [name for name, module in root.named_modules() if isinstance(module, nn.Linear)]
    found += [
        f"{name}.{FUSED}"
        for name, module in root.named_modules()
        if isinstance(module, CausalAttention)
    ]
    if not found:
        raise RequestError(
            f"{where}: this trunk ({type(root).__name__}) has no linear layers that adapters could "
            "go into: a convolutional network learns as a whole or by its last layers "
            f"(stages.image_layers). Leave {where} out."
        )
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in found):
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            raise RequestError(
                f"{where}.targets: no linear layer of this trunk is called '{target}' or ends in "
                f"'.{target}'. It has {', '.join(found[:SHOWN])}{more}."
            )
    ends = tuple(f".{target}" for target in targets) if targets else ("",)
    return [name for name in found if f".{name}".endswith(ends)]


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Peft's wrappers in a module, by their names."""
    for name, child in module.named_modules():
        if NAME in getattr(child, "lora_A", ()):
            yield name, child


def _parameter(wrapper: Any) -> str:
    """Name of the parameter that a wrapper adapts."""
    return getattr(wrapper, "parameter_name", "weight")
