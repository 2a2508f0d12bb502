"""Update RMS against its definition in float64."""

import math

import pytest
import torch

from pennyclip.config.keys import Optim
from pennyclip.optim import OPTIMIZERS
from pennyclip.optim.groups import parameter_groups
from pennyclip.training.watch.update_rms import judged, update_rms


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_it_is_what_the_paper_defines(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 7))
    optimizer = OPTIMIZERS[name](parameter_groups([("w", weight)], {}, Optim()), Optim())
    assert update_rms(optimizer, weight) is None
    moment, beta = torch.zeros(5, 7, dtype=torch.float64), Optim().betas[1]
    for step in range(1, 6):
        gradient = torch.randn(5, 7) * (100 if step == 5 else 1)
        gradient[0, 0] = 0  # never any: eps keeps the quotient finite
        weight.grad = gradient.clone()
        optimizer.step()
        moment = beta * moment + (1 - beta) * gradient.double() ** 2
        corrected = moment / (1 - beta**step)
        quotient = gradient.double() ** 2 / corrected.clamp(min=Optim().eps ** 2)
        found = update_rms(optimizer, weight)
        assert found is not None
        assert float(found) == pytest.approx(math.sqrt(quotient.mean()), rel=1e-5)
    assert float(found) > 2
    assert not judged("w", torch.nn.Parameter(torch.zeros(3)))
