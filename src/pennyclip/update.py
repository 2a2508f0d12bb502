"""One optimizer update."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from pennyclip.caching import GradientCache
from pennyclip.config import Precision
from pennyclip.data.loader import Batch
from pennyclip.errors import RequestError, RunError
from pennyclip.loss import Features, Loss
from pennyclip.model.clip import CLIP
from pennyclip.precision import autocast, float32_products
from pennyclip.scaling import LossScaler


def embed(
    model: CLIP, batch: Batch, keep: Int64[Tensor, "B K"] | None = None
) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B D"]]:
    """Image and text embeddings of a batch, from its inputs or from stored trunk features."""
    image, text = batch.image_features, batch.text_features
    if image is None:
        assert batch.images is not None
        image = model.visual.features(batch.images, keep)
    if text is None:
        assert batch.tokens is not None
        assert batch.lengths is not None
        text = model.text.features(batch.tokens, batch.lengths)
    dropout = model.config.head_dropout
    image, text = (F.dropout(x, dropout, model.training) for x in (image, text))
    return model.visual.project(image), model.text.project(text)


def update(
    model: CLIP,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    keep: Int64[Tensor, "B K"] | None = None,
    lr_factor: float,
    clip_norm: float,
    precision: Precision,
    scaler: LossScaler | None = None,
    micro_batch: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Forward, backward, clip, step: the model after it has seen one more batch.

    Args:
        model: changed in place.
        loss: what is lowered.
        optimizer: its groups carry `base_lr`, the peak rate of each.
        batch: on the model's device.
        keep: patches that each image keeps; None: all of them.
        lr_factor: share of the peak rates that is used now.
        clip_norm: largest norm of the true (unscaled) gradient over all parameters.
        precision: of the towers, not `auto`; the loss is computed in float32.
        scaler: scales the loss, and learns from the outcome; None: the loss is not scaled.
        micro_batch: pairs whose graph is kept at a time; None: the batch's.
        seed: of all that is drawn inside the towers.

    Returns:
        Metrics of this update; tensors are not yet synchronised. `skipped` is None, or says why
        no update was made: under a scaler, a loss or gradient that is not finite costs the batch.
        Then model and optimizer are unchanged.

    Raises:
        RequestError: a parameter that should learn has no gradient. The model is unchanged.
        RunError: the loss or the gradient is not finite, without a scaler or as often in a row as
            its patience allows. The model is unchanged.
    """
    used_scale = scaler.scale if scaler else 1.0
    optimizer.zero_grad(set_to_none=True)
    with float32_products(tf32=precision == "tf32"):
        record, seen = _gradients(
            model, loss, batch, keep, precision, used_scale, micro_batch or len(batch.rows), seed
        )
    learning = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in learning if p.grad is not None]
    if len(gradients) < len(learning):
        raise RequestError(_without_gradient(model, learning))
    if scaler:
        torch._foreach_mul_(gradients, 1 / used_scale)
    norm = torch.nn.utils.get_total_norm(gradients)
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * lr_factor
    record |= {
        "grad_norm": norm,
        "lr": {group["name"]: group["lr"] for group in optimizer.param_groups},
        "skipped": None,
    }
    if not (torch.isfinite(record["loss"]) and torch.isfinite(norm)):
        record["skipped"] = _overflow(_first_not_finite(model, seen), batch, scaler)
        optimizer.zero_grad(set_to_none=True)
    else:
        torch.nn.utils.clip_grads_with_norm_(learning, clip_norm, norm)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(loss.max_scale))
        if scaler:
            scaler.updated()
    if scaler:
        record |= {"loss_scale": used_scale, "overflows": scaler.overflows}
    return record


def _gradients(
    model: CLIP,
    loss: Loss,
    batch: Batch,
    keep: Int64[Tensor, "B K"] | None,
    precision: Precision,
    loss_scale: float,
    micro_batch: int,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Forward and backward: gradients, times the loss scale, of all that learns.

    Returns:
        Metrics; and, in the order in which they were computed, what may turn out not finite.
    """

    def towers(
        part: Batch, kept: Int64[Tensor, "B K"] | None
    ) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B D"]]:
        # A context each time: inside one, autocast would keep weights cast without a graph.
        with autocast(precision, part.rows.device):
            return embed(model, part, kept)

    cache = None
    if micro_batch < len(batch.rows):
        cache = GradientCache(towers, batch, keep, micro_batch=micro_batch, seed=seed)
        raw_image, raw_text = cache.embeddings
    else:
        torch.manual_seed(seed)
        raw_image, raw_text = towers(batch, keep)
    image, text = F.normalize(raw_image.float(), dim=-1), F.normalize(raw_text.float(), dim=-1)
    features = Features(
        image=image,
        text=text,
        all_image=image,
        all_text=text,
        offset=0,
        scale=model.logit_scale.exp(),
        bias=model.logit_bias,
        groups=batch.groups,
        rows=batch.rows,
    )
    with float32_products(tf32=False):
        value, metrics = loss.compute(features)
    (value * loss_scale).backward()  # type: ignore[no-untyped-call]
    if cache is not None:
        cache.backward()
    record = {
        "loss": value.detach(),
        "logit_scale": features.scale.detach().log(),
        **metrics,
    }
    seen = {"the image embedding": raw_image, "the text embedding": raw_text, "the loss": value}
    return record, seen


def _without_gradient(model: nn.Module, learning: list[nn.Parameter]) -> str:
    """What to say of parameters that the optimizer was given and the loss does not reach."""
    ids = {id(p) for p in learning if p.grad is None}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in ids]
    towers = {"visual": "image tower", "text": "text tower"}
    where = dict.fromkeys(towers.get(name.split(".")[0], "temperature") for name in names)
    return (
        f"{len(names)} of {len(learning)} parameters that should learn get no gradient, in the "
        f"{' and the '.join(where)}: {', '.join(names[:3])}{', and so on' * (len(names) > 3)}. "
        "The model was not changed. Freeze these layers in the recipe (image_layers, text_layers), "
        "or find where their graph is cut (detach, no_grad, requires_grad)."
    )


def _overflow(found: str, batch: Batch, scaler: LossScaler | None) -> str:
    """Tell the scaler of an overflow; returns what to say of a skipped update.

    Raises:
        RunError: no update can be hoped for.
    """
    what = f"{found} is not finite in the batch with rows {batch.rows[:4].tolist()}..."
    if scaler is None:
        raise RunError(
            f"{what}; this update was not made. Lower the learning rate or look at these rows."
        )
    before = scaler.scale
    scaler.overflowed()
    if scaler.exhausted:
        raise RunError(
            f"{what}, in the last of {scaler.in_a_row} batches in a row that overflowed; the loss "
            f"scale is down to {scaler.scale:,.0f}. No update was made from them. Set precision "
            "to bf16 or fp32, lower the learning rate, or look at these rows."
        )
    return f"{what}; loss scale {before:,.0f} -> {scaler.scale:,.0f}"


def _first_not_finite(model: CLIP, seen: dict[str, Tensor]) -> str:
    """Name of the first thing that is not finite: a weight, what was computed or a gradient."""
    named = list(model.named_parameters())
    suspects = {f"the weight {name}": parameter for name, parameter in named} | seen
    suspects |= {f"the gradient of {n}": p.grad for n, p in named if p.grad is not None}
    found = (name for name, tensor in suspects.items() if not torch.isfinite(tensor).all())
    return next(found, "the norm of the gradient")
