"""One optimizer update."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from pennyclip.config import Precision
from pennyclip.data.loader import Batch
from pennyclip.errors import RunError
from pennyclip.loss import Features, Loss
from pennyclip.model.clip import CLIP
from pennyclip.precision import autocast


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
) -> dict[str, Any]:
    """Forward, backward, clip, step: the model after it has seen one more batch.

    Args:
        model: changed in place.
        loss: what is lowered.
        optimizer: its groups carry `base_lr`, the peak rate of each.
        batch: on the model's device.
        keep: patches that each image keeps; None: all of them.
        lr_factor: share of the peak rates that is used now.
        clip_norm: largest norm of the gradient over all parameters.
        precision: of the towers; the loss is computed in float32.

    Returns:
        Metrics of this update; tensors are not yet synchronised.

    Raises:
        RunError: the loss or the gradient is not finite. The model is unchanged.
    """
    with autocast(precision, batch.rows.device):
        image, text = embed(model, batch, keep)
    image, text = F.normalize(image.float(), dim=-1), F.normalize(text.float(), dim=-1)
    scale = model.logit_scale.exp()
    features = Features(
        image=image,
        text=text,
        all_image=image,
        all_text=text,
        offset=0,
        scale=scale,
        bias=model.logit_bias,
        groups=batch.groups,
        rows=batch.rows,
    )
    value, metrics = loss.compute(features)

    optimizer.zero_grad(set_to_none=True)
    value.backward()  # type: ignore[no-untyped-call]
    learning = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(learning, clip_norm)
    if not (torch.isfinite(value) and torch.isfinite(norm)):
        raise RunError(
            f"{_first_not_finite(model, value)} is not finite in the batch with rows "
            f"{batch.rows[:4].tolist()}...; this update was not made. Lower the learning rate or "
            "look at these rows."
        )
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * lr_factor
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(max=math.log(loss.max_scale))
    return {
        "loss": value.detach(),
        "logit_scale": features.scale.detach().log(),
        "grad_norm": norm.detach(),
        "lr": {group["name"]: group["lr"] for group in optimizer.param_groups},
        **metrics,
    }


def _first_not_finite(model: CLIP, loss: Tensor) -> str:
    """Name of the first thing that is not finite: a weight, the loss or a gradient."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the weight {name}"
    if not torch.isfinite(loss):
        return "the loss"
    return next(
        f"the gradient of {name}"
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
    )
