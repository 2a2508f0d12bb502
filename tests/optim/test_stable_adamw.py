"""StableAdamW and Lion against scalar references in float64, and what they share with AdamW."""

import math

import pytest
import torch
from torch import Tensor, nn

from pennyclip.config.keys import Optim
from pennyclip.optim import OPTIMIZERS, step_metrics
from pennyclip.optim.stable_adamw import StableAdamW

LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.98), 1e-6, 0.05
CONFIG = Optim(lr=LR, betas=BETAS, eps=EPS)


def tensors(steps: int, jump: int | None = None) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Two parameters, and their gradients; at step `jump` those of the first grow 100 times."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,)]
    start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    gradients = [
        [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        for _ in range(steps)
    ]
    if jump is not None:
        gradients[jump][0] *= 100
    return start, gradients


def trained(name: str, start: list[Tensor], gradients: list[list[Tensor]]) -> list[list[float]]:
    params = [nn.Parameter(x.clone()) for x in start]
    groups = [
        {"name": "a", "params": params[:1], "weight_decay": DECAY},
        {"name": "b", "params": params[1:], "weight_decay": 0.0},
    ]
    optimizer = OPTIMIZERS[name](groups, CONFIG)
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach().flatten().tolist() for p in params]


def scalar_stable_adamw(
    p: list[float], gradients: list[list[float]], decay: float
) -> tuple[list[float], list[float]]:
    """Algorithm 2 of Wortsman et al. 2023 as printed, its betas corrected; and each step's RMS."""
    m, v, seen = [0.0] * len(p), [0.0] * len(p), []
    for t, g in enumerate(gradients, start=1):
        b1, b2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in BETAS)
        m = [b1 * x + (1 - b1) * y for x, y in zip(m, g, strict=True)]
        v = [b2 * x + (1 - b2) * y * y for x, y in zip(v, g, strict=True)]
        squares = [y * y / max(x, EPS * EPS) for x, y in zip(v, g, strict=True)]
        seen.append(math.sqrt(sum(squares) / len(squares)))
        rate = LR / max(1.0, seen[-1])
        p = [
            w - rate * decay * w - rate * x / (math.sqrt(y) + EPS)
            for w, x, y in zip(p, m, v, strict=True)
        ]
    return p, seen


def scalar_lion(p: list[float], gradients: list[list[float]], decay: float) -> list[float]:
    """Algorithm 2 of Chen et al. 2023."""
    m = [0.0] * len(p)
    for g in gradients:
        c = [BETAS[0] * x + (1 - BETAS[0]) * y for x, y in zip(m, g, strict=True)]
        p = [w - LR * (math.copysign(1, x) + decay * w) for w, x in zip(p, c, strict=True)]
        m = [BETAS[1] * x + (1 - BETAS[1]) * y for x, y in zip(m, g, strict=True)]
    return p


@pytest.mark.parametrize("steps", [1, 6])
def test_stable_adamw_equals_the_paper(steps: int) -> None:
    start, gradients = tensors(steps, jump=4 if steps > 4 else None)
    found = trained("stable-adamw", start, gradients)
    for number, decay in enumerate((DECAY, 0.0)):
        flat = [g[number].flatten().tolist() for g in gradients]
        expected, rms = scalar_stable_adamw(start[number].flatten().tolist(), flat, decay)
        assert found[number] == pytest.approx(expected, abs=1e-10, rel=1e-10)
        if steps > 4:  # the jump was felt where it happened, and only there
            assert (rms[4] > 2) == (number == 0)


def test_stable_adamw_is_adamw_while_gradients_do_not_grow() -> None:
    start, gradients = tensors(1)
    falling = [[g * 0.9**n for g in gradients[0]] for n in range(8)]  # an RMS of at most 1
    calm = trained("stable-adamw", start, falling)
    assert calm == [pytest.approx(x, abs=1e-12) for x in trained("adamw", start, falling)]
    start, jumping = tensors(6, jump=4)
    stable, plain = (trained(name, start, jumping) for name in ("stable-adamw", "adamw"))
    assert max(abs(a - b) for a, b in zip(stable[0], plain[0], strict=True)) > 1e-3


def test_lion_equals_the_paper() -> None:
    start, gradients = tensors(6)
    found = trained("lion", start, gradients)
    for number, decay in enumerate((DECAY, 0.0)):
        flat = [g[number].flatten().tolist() for g in gradients]
        expected = scalar_lion(start[number].flatten().tolist(), flat, decay)
        assert found[number] == pytest.approx(expected, abs=1e-10, rel=1e-10)


@pytest.mark.parametrize("kind", ["stable-adamw", "lion"])
def test_a_step_reads_nothing_back(kind: str) -> None:
    """Meta tensors hold no data: any read of a value on the host would raise."""
    params = [nn.Parameter(torch.empty(s, device="meta")) for s in ((5, 4), (3,), ())]
    optimizer = OPTIMIZERS[kind]([{"params": params, "weight_decay": 0.1}], CONFIG)
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer.step()
    optimizer.step()


def test_stable_adamw_works_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one tensor each, and with a parameter that joins later."""
    start, gradients = tensors(4)
    whole = trained("stable-adamw", start, gradients)
    monkeypatch.setattr("pennyclip.optim.stable_adamw.CHUNK", 1)
    assert trained("stable-adamw", start, gradients) == whole
    late, early = (nn.Parameter(x.clone()) for x in start)
    optimizer = StableAdamW([late, early], LR, BETAS, EPS, 0.0)
    for n, (g_late, g_early) in enumerate(gradients):
        late.grad, early.grad = (g_late.clone() if n else None), g_early.clone()
        optimizer.step()
    flat = [g[0].flatten().tolist() for g in gradients[1:]]
    expected, _ = scalar_stable_adamw(start[0].flatten().tolist(), flat, 0.0)
    assert late.flatten().tolist() == pytest.approx(expected, abs=1e-10)
    assert early.tolist() == pytest.approx(whole[1], abs=1e-10)


def test_trust_ratios_are_lambs_alone_and_by_group() -> None:
    params = [nn.Parameter(torch.full((4,), float(n + 1))) for n in range(4)]
    for p in params:
        p.grad = torch.ones(4)
    groups = [
        {"name": "image", "params": params[:3], "weight_decay": 0.0},
        {"name": "heads", "params": params[3:], "weight_decay": 0.0},
    ]
    assert step_metrics(OPTIMIZERS["adamw"](groups, CONFIG)) == {}
    lamb = OPTIMIZERS["lamb"](groups, CONFIG)
    lamb.step()  # each update is all ones, so that a ratio is the weights' own size
    ratios = step_metrics(lamb)["trust_ratio"]
    assert ratios == pytest.approx({"image": 2.0, "heads": 4.0}, rel=1e-5)
