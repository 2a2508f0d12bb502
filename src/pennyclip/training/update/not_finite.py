"""What was not finite first: a weight, a layer's output, an embedding, the loss or a gradient."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pennyclip.data.loader import Batch
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import evaluating
from pennyclip.training.update.parallel import Ranks

NORM = "the norm of the gradient"


def find(
    model: CLIP,
    seen: dict[str, Tensor],
    batch: Batch,
    forward: Callable[[slice], object],
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Name the first tensor that is not finite after a forward and a backward pass.

    Args:
        model: with its gradients, summed over ranks.
        seen: the embeddings of images and texts, then the loss.
        batch: what they were computed from.
        forward: computes the embeddings of some of its rows again.
        ranks: among which the batch is a part; None: it is whole.

    Returns:
        `tensor`, and `rows`: those whose embeddings are not finite, or all where none is. Of
        several ranks all give the same: what comes first on any of them, and the rows of all.
        Where only the gradient's norm overflows, `largest`: the largest number in the gradient, and
        the `parameter` in whose gradient it is.
    """
    bad = torch.zeros(len(batch.rows), dtype=torch.bool, device=batch.rows.device)
    for embedding in list(seen.values())[:2]:
        bad |= ~torch.isfinite(embedding.detach()).all(1)
    weights = {f"the weight {name}": p for name, p in model.named_parameters()}
    gradients = {
        f"the gradient of {name}": p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    weight, output = _first(weights), None
    if weight is None and bad.any():
        place = int(bad.nonzero()[0])
        with evaluating(model):  # no statistics move; without dropout, hardly another result
            output = first_output(model, lambda: forward(slice(place, place + 1)))
    later = [_first({name: tensor}) for name, tensor in seen.items()]
    names = [weight, output, *later, _first(gradients), NORM]
    first = next(place for place, name in enumerate(names) if name)
    found = [(first, names[first], batch.rows[bad].tolist(), batch.rows.tolist())]
    if ranks:
        found = ranks.everywhere(found[0])
    tensor = min(found, key=lambda one: one[0])[1]
    rows = [row for one in found for row in one[2]] or [row for one in found for row in one[3]]
    return {"tensor": tensor, "rows": rows} | (_largest(model) if tensor == NORM else {})


def _largest(model: nn.Module) -> dict[str, Any]:
    learnt = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = {name: float(gradient.abs().max()) for name, gradient in learnt.items()}
    name = max(largest, key=largest.__getitem__)
    return {"largest": largest[name], "parameter": name}


def _first(tensors: Mapping[str, Tensor]) -> str | None:
    return next((name for name, t in tensors.items() if not torch.isfinite(t).all()), None)


@torch.no_grad()
def first_output(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Run `forward` and name the first module, the innermost, whose output is not finite."""
    found: list[str] = []

    def hook(name: str) -> Callable[[nn.Module, object, object], None]:
        def look(module: nn.Module, inputs: object, output: object) -> None:
            if not found and torch.is_tensor(output) and not torch.isfinite(output).all():
                found.append(f"the output of {name}")

        return look

    hooks = [m.register_forward_hook(hook(name)) for name, m in model.named_modules()]
    try:
        forward()
    finally:
        for handle in hooks:
            handle.remove()
    return found[0] if found else None
