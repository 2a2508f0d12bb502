"""Activation checkpointing: the same gradients, from fewer kept activations."""

import pytest
import timm
import torch
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ActivationCheckpointing, Precision
from pennyclip.loss import LOSSES
from pennyclip.model.masking import keep_indices
from pennyclip.model.recompute import image_blocks, recompute
from pennyclip.training.update.update import update
from update_batches import adamw, gradients, pairs, tiny_clip


def one_update(
    config: ActivationCheckpointing, micro_batch: int | None, precision: Precision = "fp32"
) -> tuple[dict, int]:
    """Gradients, and the bytes that were kept for the backward pass."""
    model, kept = tiny_clip(dropout=0.2), 0
    recompute(model, config)

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    keep = keep_indices(6, 16, 0.5, seed=0, step=0, device="cpu")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        update(
            model,
            LOSSES["infonce"],
            adamw(model),
            pairs(6),
            keep=keep,
            clip_norm=float("inf"),
            precision=precision,
            micro_batch=micro_batch,
            seed=3,
        )
    return gradients(model), kept


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_gradients_are_equal_and_less_is_kept(micro_batch: int | None) -> None:
    """With dropout and masks, in one pass and with gradient caching."""
    whole, all_of_it = one_update(ActivationCheckpointing(), micro_batch)
    parts, less = one_update(ActivationCheckpointing(image="all", text=1), micro_batch)
    assert whole.keys() == parts.keys()
    for name, gradient in whole.items():
        assert torch.equal(gradient, parts[name]), name
    assert less < 0.7 * all_of_it
    first, between = one_update(ActivationCheckpointing(image=1), micro_batch)
    assert less < between < all_of_it
    assert all(torch.equal(gradient, first[name]) for name, gradient in whole.items())


@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure-bf16", "pure-fp16"])
def test_in_16_bits_what_is_computed_again_is_what_was(precision: Precision) -> None:
    """Attention is computed in float32 on CPUs, in a context that is gone by then."""
    whole, _ = one_update(ActivationCheckpointing(), None, precision)
    parts, _ = one_update(ActivationCheckpointing(image="all", text="all"), None, precision)
    assert all(torch.equal(gradient, parts[name]) for name, gradient in whole.items())


def test_names_of_parameters_stay() -> None:
    model = tiny_clip()
    before = list(model.state_dict())
    recompute(model, ActivationCheckpointing(image="all", text="all"))
    assert list(model.state_dict()) == before


@pytest.mark.parametrize(
    ("name", "count"),
    [("eva02_tiny_patch14_224", 12), ("convnext_atto", 12), ("tf_efficientnet_lite0", 16)],
)
def test_blocks_of_other_trunks_are_found(name: str, count: int) -> None:
    assert len(image_blocks(timm.create_model(name, num_classes=0))) == count


def test_more_blocks_than_there_are() -> None:
    with pytest.raises(RequestError, match=r"activation_checkpointing\.text = 3.*2 blocks"):
        recompute(tiny_clip(), ActivationCheckpointing(text=3))
