"""LAMB against a scalar reference, timm, its own reload, and itself compiled."""

import copy
import io
import math
from collections.abc import Iterator

import pytest
import timm.optim
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from pennyclip.optim import lamb_passes
from pennyclip.optim.lamb import Lamb
from pennyclip.optim.lamb_passes import COMPILED_MIN, CPU_PIECE

LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.98), 1e-6, 0.05
VARIANTS = ["paper", "nvlamb", "eva"]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


def scalar_lamb(p, grads, decays, variant):
    """Plain Python: p and each of the steps in grads are lists of lists of floats."""
    m = [[0.0] * len(x) for x in p]
    v = [[0.0] * len(x) for x in p]
    p = [list(x) for x in p]
    b1, b2 = BETAS
    ratios = []
    for t, step_grads in enumerate(grads, start=1):
        if variant == "nvlamb":
            norm = math.sqrt(math.fsum(g * g for x in step_grads for g in x))
            step_grads = [[g / max(1.0, norm) for g in x] for x in step_grads]
        c1, c2 = 1 - b1**t, 1 - b2**t
        ratios = []
        for i, (x, gs) in enumerate(zip(p, step_grads, strict=True)):
            r = []
            for j, g in enumerate(gs):
                m[i][j] = b1 * m[i][j] + (1 - b1) * g
                v[i][j] = b2 * v[i][j] + (1 - b2) * g * g
                if variant == "eva":
                    adam = m[i][j] / (math.sqrt(v[i][j]) + EPS)
                else:
                    adam = (m[i][j] / c1) / (math.sqrt(v[i][j] / c2) + EPS)
                r.append(adam + decays[i] * x[j])
            p_norm = math.sqrt(math.fsum(w * w for w in x))
            r_norm = math.sqrt(math.fsum(w * w for w in r))
            ratio = p_norm / r_norm if p_norm > 0 and r_norm > 0 else 1.0
            step = LR
            if variant == "eva":
                ratio = min(max(ratio, 0.01), 10.0)
                step = LR * math.sqrt(c2) / c1
            elif variant == "nvlamb" and decays[i] == 0:
                ratio = 1.0
            ratios.append(ratio)
            for j in range(len(x)):
                x[j] -= step * ratio * r[j]
    return p, ratios


def seeded(
    shapes, steps, dtype=torch.float64, scale=1.0
) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    grads = [
        [
            (torch.randn(s, generator=generator, dtype=torch.float64) * scale).to(dtype)
            for s in shapes
        ]
        for _ in range(steps)
    ]
    return start, grads


def train(optimizer: torch.optim.Optimizer, grads: list[list[Tensor]]) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step_grads in grads:
        for p, g in zip(params, step_grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return [p.detach() for p in params]


def parameters(start: list[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(x.clone()) for x in start]


def farthest(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_scalar_reference(variant):
    start, grads = seeded([(6,), (5,), (4,), (3,), (2,)], 6)
    start[1] *= 100  # eva: ratio above 10
    start[2] *= 1e-4  # eva: ratio below 0.01
    start[3].zero_()
    for g in grads[3:]:  # nvlamb: a norm above 1, then below
        for x in g:
            x *= 0.01
    for g in grads:
        g[4].zero_()  # r is zero in a tensor without weight decay
    decays = [DECAY, DECAY, DECAY, 0.0, 0.0]
    params = parameters(start)
    names = ["a", "b", "c", "d", "e"]
    groups = [
        {"params": list(zip(names[:3], params[:3], strict=True))},
        {"params": list(zip(names[3:], params[3:], strict=True)), "weight_decay": 0.0},
    ]
    lamb = Lamb(groups, LR, BETAS, EPS, DECAY, variant=variant)
    for n in range(1, 7):
        train(lamb, grads[n - 1 : n])
        expected, ratios = scalar_lamb(
            [x.tolist() for x in start],
            [[x.tolist() for x in g] for g in grads[:n]],
            decays,
            variant,
        )
        for p, x in zip(params, expected, strict=True):
            assert p.tolist() == pytest.approx(x, abs=1e-10, rel=1e-10)
        found = lamb.trust_ratios()
        assert list(found) == names
        assert list(found.values()) == pytest.approx(ratios, rel=1e-10)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"variant": "paper"}, {"max_grad_norm": None, "always_adapt": True}),
        ({"variant": "nvlamb"}, {"max_grad_norm": 1.0, "always_adapt": False}),
    ],
)
def test_equals_timm(ours, theirs):
    shapes = [(3 * CPU_PIECE // 1000 + 1, 1000), (40, 30), (7,), (), (4, 3, 2, 2)]
    start, grads = seeded(shapes, 3, scale=0.1)
    finals = []
    for cls, options in ((Lamb, ours), (timm.optim.Lamb, theirs)):
        params = parameters(start)
        groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
        common = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
        finals.append(train(cls(groups, **common, **options), grads))
    assert farthest(*finals) < 1e-10


def test_reference_point():
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    train(Lamb([w], 0.1, (0.9, 0.999), 1e-6, 0.01), [[torch.tensor([0.1, 0.2])]])
    assert w.tolist() == pytest.approx([2.64816, 3.64474], abs=1e-4)
    assert (w - torch.tensor([3.0, 4.0])).norm().item() == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_zero_parameter_steps_by_the_rate(variant):
    w = nn.Parameter(torch.zeros(2))
    lamb = Lamb([("w", w)], 0.1, variant=variant)
    train(lamb, [[torch.tensor([0.1, 0.2])]])
    assert lamb.trust_ratios() == {"w": 1.0}
    assert w.tolist() == pytest.approx([-0.1, -0.1], abs=1e-3)


def test_the_norm_of_a_large_float32_tensor_is_exact():
    p = nn.Parameter(torch.randn(8_000_000, generator=torch.Generator().manual_seed(0)))
    p.grad = torch.ones(8_000_000)
    lamb = Lamb([("p", p)], LR, weight_decay=0.0)
    exact = (p.detach().double().norm() / math.sqrt(8_000_000)).item()
    lamb.step()  # r is 1 / (1 + eps) everywhere
    assert lamb.trust_ratios()["p"] == pytest.approx(exact, rel=2e-5)


def test_channels_last_and_a_parameter_that_joins_later():
    start, grads = seeded([(5, 4, 3, 3), (4, 4)], 3)
    params = parameters(start)
    params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)
    lamb = Lamb(params, LR)
    params[0].grad = grads[0][0].clone()
    lamb.step()
    train(lamb, grads[1:])
    late, early = parameters(start[1:]), parameters(start[:1])
    train(Lamb(late, LR), [g[1:] for g in grads[1:]])
    train(Lamb(early, LR), [g[:1] for g in grads])
    assert farthest([*early, *late], params) < 1e-12
    assert torch.equal(params[0].grad, grads[2][0])  # gradients are left alone


@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_bit_equal(variant):
    start, grads = seeded([(50, 40), (30,), ()], 5, dtype=torch.float32)

    def new(values):
        return Lamb(parameters(values), LR, variant=variant)

    unbroken = new(start)
    middle = [p.clone() for p in train(unbroken, grads[:3])]
    saved = io.BytesIO()
    torch.save(unbroken.state_dict(), saved)
    saved.seek(0)
    resumed = new(middle)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    duplicate = copy.deepcopy(unbroken)
    ends = [train(o, grads[3:]) for o in (unbroken, resumed, duplicate)]
    for a, b, c in zip(*ends, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    for x, y in zip(unbroken.state.values(), resumed.state.values(), strict=True):
        assert all(torch.equal(x[key], y[key]) and x[key].dtype == y[key].dtype for key in x)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_reads_nothing_back(variant):
    """Meta tensors hold no data: any read of a value on the host would raise."""
    params = [nn.Parameter(torch.empty(s, device="meta")) for s in ((5, 4), (3,), ())]
    lamb = Lamb(params, LR, variant=variant)
    train(lamb, [[torch.empty_like(p) for p in params]] * 2)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta"):
        lamb.trust_ratios()


@pytest.mark.parametrize(("variant", "dtype"), [("eva", torch.float32), ("nvlamb", torch.float64)])
def test_compiled_equals_uncompiled(variant, dtype):
    """In channels-last memory too, and switched on and off in the middle of training."""
    shapes = [(COMPILED_MIN // 100 + 1, 100), (300, 400), (7,), (64, 64, 3, 3)]
    start, grads = seeded(shapes, 3, dtype=dtype)
    finals = []
    for compiled in (False, True):
        params = parameters(start)
        params[3].data = params[3].data.contiguous(memory_format=torch.channels_last)
        lamb = Lamb(params, LR, variant=variant)
        train(lamb, grads[:1])
        lamb.compile(compiled)
        graphs = counters["stats"]["unique_graphs"]
        train(lamb, grads[1:2])
        assert counters["stats"]["unique_graphs"] == graphs  # compile() has made what steps run
        lamb.compile(False)
        finals.append(train(lamb, grads[2:]))
    # float32: the order of a sum, in each of 3 steps of 1 % of weights up to 4
    assert farthest(*finals) < (1e-12 if dtype == torch.float64 else 1e-6)


def test_a_compiler_that_fails_changes_nothing(monkeypatch):
    def fail(*args):
        raise RuntimeError("no C++ compiler")

    start, grads = seeded([(300, 400)], 2)
    lamb, plain = Lamb(parameters(start), LR), Lamb(parameters(start), LR)
    monkeypatch.setattr(lamb_passes, "_compiled_kernel", lambda: fail)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler"):
        lamb.compile()
    assert farthest(train(lamb, grads), train(plain, grads)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "apex"}, "variant"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Lamb([nn.Parameter(torch.ones(2))], LR, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_need_masters(dtype):
    with pytest.raises(ValueError, match=r"group 0, params in float32 or float64: found .*16"):
        Lamb([nn.Parameter(torch.ones(2, dtype=dtype))], LR)
