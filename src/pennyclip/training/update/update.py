"""One optimizer update."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Precision
from pennyclip.data.loader import Batch
from pennyclip.loss import Features, Loss
from pennyclip.model.clip import CLIP
from pennyclip.training.telemetry.gradients import LayerGradients, tensor_norms
from pennyclip.training.update import not_finite
from pennyclip.training.update.caching import (
    GradientCache,
    check_ranks,
    learning_batch_norms,
    micro_seed,
    rows_of,
)
from pennyclip.training.update.memory import OutOfMemory, ran_out
from pennyclip.training.update.narrow import narrowed, round_weights
from pennyclip.training.update.parallel import Ranks, together
from pennyclip.training.update.precision import autocast, float32_products, own_precisions
from pennyclip.training.update.scaling import LossScaler


def embed_image(
    model: CLIP, batch: Batch, keep: Int64[Tensor, "B K"] | None = None
) -> Float[Tensor, "B D"]:
    """Image embeddings of a batch, from its pictures or from what frozen layers made of them."""
    features, states = batch.image_features, batch.image_states
    if states is not None:
        features = model.visual.suffix(states.values.float(), states.layers)
    elif features is None:
        assert batch.images is not None
        features = model.visual.features(batch.images, keep)
    return model.visual.project(F.dropout(features, model.config.head_dropout, model.training))


def embed_text(model: CLIP, batch: Batch) -> Float[Tensor, "B D"]:
    """Text embeddings of a batch, from its tokens or from what frozen layers made of them."""
    features, states = batch.text_features, batch.text_states
    if states is not None:
        assert batch.lengths is not None
        features = model.text.suffix(states.values.float(), batch.lengths, states.layers)
    elif features is None:
        assert batch.tokens is not None
        assert batch.lengths is not None
        features = model.text.features(batch.tokens, batch.lengths)
    return model.text.project(F.dropout(features, model.config.head_dropout, model.training))


def update(
    model: CLIP,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    keep: Int64[Tensor, "B K"] | None = None,
    clip_norm: float,
    precision: Precision,
    stochastic_rounding: bool = False,
    scaler: LossScaler | None = None,
    micro_batch: int | None = None,
    seed: int = 0,
    layers: LayerGradients | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Forward, backward, clip, step: the model after it has seen one more batch.

    Several ranks make the update of a single process that has all their rows: on each of them the
    same numbers come out, and the same weights.

    Args:
        model: changed in place.
        loss: what is lowered.
        optimizer: its groups carry the rates of this update.
        batch: on the model's device; this rank's part, one of equal parts.
        keep: patches that each image keeps, of all ranks; None: all of them.
        clip_norm: largest norm of the true (unscaled) gradient over all parameters.
        precision: of the towers, not `auto`; the loss is computed in float32.
        stochastic_rounding: in pure-bf16, keep no float32 masters of the weights.
        scaler: scales the loss, and learns from the outcome; None: the loss is not scaled.
        micro_batch: pairs whose graph is kept at a time; None: the batch's. Halved where memory
            runs out, which changes nothing but what dropout draws.
        seed: of all that is drawn inside the towers.
        layers: those of this optimizer's parameters, for a run that is watched.
        ranks: this process beside the others, all with the same arguments but for the batch; None:
            a single process.

    Returns:
        Metrics of this update, numbers. `skipped` is None; or no update was made, because the loss
        or the gradient is not finite, model and optimizer are unchanged, and it says which `tensor`
        was the first, and in which `rows` (see `not_finite.find`). `micro_batch` is the one that
        did it; `shortage` is None, or says why that is a smaller one. Of a run that is watched also
        `grad_norms` by layer, and `features`: the embeddings, without their graph.

    Raises:
        RequestError: a parameter that should learn has no gradient, or BatchNorms would learn from
            each rank's rows alone. The model is unchanged.
        RunError: memory runs out and no micro-batch helps, or another rank failed. The model is
            unchanged, unless that was in the optimizer's own step.
    """
    if ranks:
        check_ranks(model, ranks.count)
        keep = None if keep is None else keep[ranks.part(len(batch.rows))]
    used_scale = scaler.scale if scaler else 1.0
    size = asked = micro_batch or len(batch.rows)
    learning = [p for group in optimizer.param_groups for p in group["params"]]
    while True:
        optimizer.zero_grad(set_to_none=True)
        try:
            with together(ranks):
                with _computing(model, batch, precision, size, not stochastic_rounding):
                    record, seen, features = _gradients(
                        model, loss, batch, keep, precision, used_scale, size, seed, ranks
                    )
                if ranks:
                    ranks.sum_(_learnt(model, learning))
                    record = ranks.mean(record)
            break
        except RuntimeError as error:
            if not ran_out(error):
                raise
        # Not before the error is gone is there room again: it holds all that was computed.
        size = _smaller(model, size, batch)
    record |= {"micro_batch": size, "shortage": None}
    if size < asked:
        record["shortage"] = (
            f"memory ran out with {asked} pairs in the towers at a time: from here on {size}. "
            "Updates stay those of the whole batch; only what dropout draws is another."
        )
    gradients = _learnt(model, learning)
    if scaler:
        torch._foreach_mul_(gradients, 1 / used_scale)
    norms = tensor_norms(gradients)
    norm = torch.linalg.vector_norm(norms)
    tensors = {k: v for k, v in record.items() if torch.is_tensor(v)} | {"grad_norm": norm}
    numbers = torch.stack([t.float() for t in tensors.values()])
    by_layer = layers.norms(norms) if layers else norms[:0]
    read = torch.cat([numbers, by_layer]).tolist()  # the one wait for the device in an update
    record |= zip(tensors, read, strict=False)
    if layers:
        record["grad_norms"] = dict(zip(layers.names, read[len(tensors) :], strict=True))
        record["features"] = features
    record |= {
        "lr": {group["name"]: group["lr"] for group in optimizer.param_groups},
        "skipped": None,
    }
    if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):

        def again(at: slice) -> None:
            part = rows_of(batch, at)
            with (
                _computing(model, part, precision, len(part.rows), not stochastic_rounding),
                autocast(precision, part.rows.device),
            ):
                embed_image(model, part, None if keep is None else keep[at])
                embed_text(model, part)

        with together(ranks):
            record["skipped"] = not_finite.find(model, seen, batch, again, ranks)
        optimizer.zero_grad(set_to_none=True)
        if scaler:
            scaler.overflowed()
            record["skipped"]["loss_scale_after"] = scaler.scale
    else:
        torch.nn.utils.clip_grads_with_norm_(learning, clip_norm, norm)
        _step(optimizer, ranks)
        if stochastic_rounding:
            round_weights(model, precision, seed)
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(loss.max_scale))
        if scaler:
            scaler.updated()
    if scaler:
        record |= {"loss_scale": used_scale, "overflows": scaler.overflows}
    return record


@contextmanager
def _computing(
    model: CLIP, batch: Batch, precision: Precision, micro_batch: int, masters: bool
) -> Iterator[None]:
    """All that a precision means, apart from autocast."""
    with (
        float32_products(tf32=precision == "tf32"),
        own_precisions(),
        narrowed(
            model,
            precision,
            masters=masters,
            accumulate=micro_batch < len(batch.rows),
            stored=_stored(model, batch),
        ),
    ):
        yield


def _stored(model: CLIP, batch: Batch) -> list[nn.Module]:
    """The towers whose trunk is frozen and has run before."""
    towers = (model.visual, batch.image_features), (model.text, batch.text_features)
    return [tower for tower, features in towers if features is not None]


def _gradients(
    model: CLIP,
    loss: Loss,
    batch: Batch,
    keep: Int64[Tensor, "B K"] | None,
    precision: Precision,
    loss_scale: float,
    micro_batch: int,
    seed: int,
    ranks: Ranks | None,
) -> tuple[dict[str, Any], dict[str, Tensor], Features]:
    """Forward and backward: gradients, times the loss scale, of all that learns.

    Of several ranks each has its share: the sum over ranks is the gradient of the whole batch, and
    metrics are to be averaged.

    Returns:
        Metrics; in the order in which they were computed, what may turn out not finite; and what
        the loss of all rows was given, without its graph.
    """

    # A context each time: inside one, autocast would keep weights cast without a graph.
    def image_tower(part: Batch, kept: Int64[Tensor, "B K"] | None) -> Float[Tensor, "B D"]:
        with autocast(precision, part.rows.device):
            return embed_image(model, part, kept)

    def text_tower(part: Batch, _: Int64[Tensor, "B K"] | None) -> Float[Tensor, "B D"]:
        with autocast(precision, part.rows.device):
            return embed_text(model, part)

    cache = None
    if micro_batch < len(batch.rows):
        towers = image_tower, text_tower
        rank = ranks.rank if ranks else 0
        cache = GradientCache(towers, batch, keep, micro_batch=micro_batch, seed=seed, rank=rank)
        raw_image, raw_text = cache.embeddings
    elif ranks:  # a rank's part is one of the batch's micro-batches
        torch.manual_seed(micro_seed(seed, ranks.rank, 0))
        raw_image = image_tower(batch, keep)
        torch.manual_seed(micro_seed(seed, ranks.rank, 1))
        raw_text = text_tower(batch, None)
    else:
        torch.manual_seed(seed)
        raw_image, raw_text = image_tower(batch, keep), text_tower(batch, None)
    image, text = F.normalize(raw_image.float(), dim=-1), F.normalize(raw_text.float(), dim=-1)
    all_image, all_text, groups = image, text, batch.groups
    if ranks:
        all_image, all_text, groups = ranks.gather(image, text, groups)
    features = Features(
        image=image,
        text=text,
        all_image=all_image,
        all_text=all_text,
        offset=ranks.part(len(image)).start if ranks else 0,
        scale=model.logit_scale.exp(),
        bias=model.logit_bias,
        groups=groups,
    )
    with float32_products(tf32=False):
        value, metrics = loss.compute(features)
    share = loss_scale / (ranks.count if ranks else 1)
    (value * share).backward()  # type: ignore[no-untyped-call]
    if cache is not None:
        cache.backward()
    image, text = all_image.detach(), all_text.detach()
    record = {
        "loss": value.detach(),
        "logit_scale": features.scale.detach().log(),
        "image_cosine": _mean_cosine(image),
        "text_cosine": _mean_cosine(text),
        **metrics,
    }
    seen = {"the image embedding": raw_image, "the text embedding": raw_text, "the loss": value}
    detached = replace(
        features,
        image=image,
        text=text,
        all_image=image,
        all_text=text,
        offset=0,
        scale=features.scale.detach(),
    )
    return record, seen, detached


def _mean_cosine(embeddings: Float[Tensor, "B D"]) -> Float[Tensor, ""]:
    """Between different rows: 1 where all embeddings are one."""
    count = len(embeddings)
    return (embeddings.sum(0).square().sum() - count) / (count * (count - 1))


def _smaller(model: CLIP, size: int, batch: Batch) -> int:
    """Half a micro-batch that did not fit.

    Raises:
        OutOfMemory: there is no half, or with it the model would learn something else.
    """
    what = f"memory ran out with {size} of the {len(batch.rows)} pairs of a batch in the towers"
    norms = learning_batch_norms(model)
    if norms:
        raise OutOfMemory(
            f"{what}, and fewer at a time would change what {len(norms)} BatchNorm layers "
            f"({norms[0]}, ...) learn. The model was not changed. Lower batch_size or image_size, "
            "start from weights (their stored statistics are then used), or take a tower without "
            "BatchNorm."
        )
    if size == 1:
        raise OutOfMemory(
            f"{what}: not even one pair fits. The model was not changed. Lower batch_size, "
            "image_size or the number of layers that learn, or take smaller towers."
        )
    if batch.rows.is_cuda:
        torch.cuda.empty_cache()
    return size // 2


def _step(optimizer: torch.optim.Optimizer, ranks: Ranks | None) -> None:
    """The optimizer's step, in which no smaller micro-batch can help."""
    try:
        with together(ranks):
            optimizer.step()
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise OutOfMemory(
            "memory ran out in the optimizer's step, which may have moved some weights and not "
            f"others: go on from the last checkpoint. Its state does not fit beside weights and "
            f"gradients ({error}). Let fewer layers learn, or take smaller towers."
        ) from error


def _learnt(model: nn.Module, learning: list[nn.Parameter]) -> list[Tensor]:
    """The gradients of what the optimizer was given, all of which the loss has to reach."""
    gradients = [p.grad for p in learning if p.grad is not None]
    if len(gradients) == len(learning):
        return gradients
    ids = {id(p) for p in learning if p.grad is None}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in ids]
    towers = {"visual": "image tower", "text": "text tower"}
    where = dict.fromkeys(towers.get(name.split(".")[0], "temperature") for name in names)
    raise RequestError(
        f"{len(names)} of {len(learning)} parameters that should learn get no gradient, in the "
        f"{' and the '.join(where)}: {', '.join(names[:3])}{', and so on' * (len(names) > 3)}. "
        "The model was not changed. Freeze these layers in the recipe (image_layers, text_layers), "
        "or find where their graph is cut (detach, no_grad, requires_grad)."
    )
