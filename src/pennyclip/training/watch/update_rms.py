"""How far an update's gradients outgrow what the optimizer remembers of them."""

import torch
from torch import Tensor, nn

from pennyclip.optim.groups import decays

LIMIT = 2.3
"""Above it, a loss spike follows within 1 to 8 updates: Wortsman et al. 2023 (arXiv 2304.13013)."""
SHOWN = 3  # tensors


@torch.no_grad()
def update_rms(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor | None:
    """sqrt(mean(g^2 / max(v, eps^2))) of the last update, a scalar on the device.

    Update clipping's measure, of Shazeer and Stern 2018 (arXiv 1804.04235). v is Adam's second
    moment, corrected for its start. About 1 where v is up to date.

    Returns:
        None where the optimizer keeps no second moment, or made no update.
    """
    state = optimizer.state.get(parameter, {})
    if parameter.grad is None or "exp_avg_sq" not in state:
        return None
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    moment = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"])
    return (parameter.grad.square() / moment.clamp(min=group["eps"] ** 2)).mean().sqrt()


def judged(name: str, parameter: nn.Parameter) -> bool:
    """Whether update RMS means something: in a vector, a single number may decide it."""
    return parameter.requires_grad and decays(name, parameter)


class LargestRms:
    """Of the first matrix that learns: the patch embedding, if it does. It stays on the device."""

    def __init__(self) -> None:
        self._seen: Tensor | None = None

    def see(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
        """Take in the last update; the matrix's name, or None where it has no update RMS."""
        matrices = ((n, p) for n, p in model.named_parameters() if judged(n, p))
        name, first = next(matrices, ("", None))
        rms = None if first is None else update_rms(optimizer, first)
        if rms is None:
            return None
        self._seen = rms if self._seen is None else self._seen.maximum(rms)
        return name

    def read(self) -> float:
        """The largest since it was last read; 0: there was none. Waits for the device."""
        seen, self._seen = self._seen, None
        return 0.0 if seen is None else float(seen)


def largest_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, float]]:
    """The tensors with the largest gradient norm, and with the largest update RMS.

    This waits for the device, and passes over all gradients.
    """
    norms, updates = {}, {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and judged(name, parameter):
            norms[name] = float(parameter.grad.norm())
            rms = update_rms(optimizer, parameter)
            if rms is not None:
                updates[name] = float(rms)
    return {
        key: dict(sorted(found.items(), key=lambda item: -item[1])[:SHOWN])
        for key, found in (("largest_gradients", norms), ("largest_update_rms", updates))
    }
