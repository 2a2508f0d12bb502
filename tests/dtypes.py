"""An update in a precision, and the dtypes that its kernels were really given."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.training.update.update import update
from update_batches import adamw

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
COMPUTES = ("mm", "bmm", "addmm", "convolution", "native_layer_norm", "native_batch_norm")


def one(model: CLIP, batch: Any, **changed: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"clip_norm": 1e6, "precision": "pure-bf16"} | changed
    optimizer = options.pop("optimizer", None) or adamw(model)
    return update(model, LOSSES["infonce"], optimizer, batch, **options)


@contextmanager
def spying(model: nn.Module) -> Iterator[dict[str, set[torch.dtype]]]:
    """By module, the dtypes that its kernels (matrices, kernels, norms) were really given."""
    stack, seen = [""], {}

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.overloadpacket.__name__ in COMPUTES:
                inputs = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
                found = {x.dtype for x in inputs if x.is_floating_point()}
                seen.setdefault(stack[-1], set()).update(found)
            return func(*args, **(kwargs or {}))

    handles = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)),
            module.register_forward_hook(lambda *_: stack.pop() and None),
        ]
    with Spy():
        yield seen
    for handle in handles:
        handle.remove()
