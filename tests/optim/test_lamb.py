"""LAMB against a scalar reference, timm, its own reload, and itself in two processes."""

import copy
import io
import math
import os
import tempfile
from collections.abc import Iterator

import pytest
import timm.optim
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

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


def scalar_lamb(p, grads, decays, variant, always_adapt=False):
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
            elif variant == "nvlamb" and decays[i] == 0 and not always_adapt:
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


@pytest.mark.parametrize(
    ("variant", "always_adapt"), [*((v, False) for v in VARIANTS), ("nvlamb", True)]
)
def test_equals_the_scalar_reference(variant, always_adapt):
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
    lamb = Lamb(groups, LR, BETAS, EPS, DECAY, variant=variant, always_adapt=always_adapt)
    for n in range(1, 7):
        train(lamb, grads[n - 1 : n])
        expected, ratios = scalar_lamb(
            [x.tolist() for x in start],
            [[x.tolist() for x in g] for g in grads[:n]],
            decays,
            variant,
            always_adapt,
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
        (
            {"variant": "nvlamb", "always_adapt": True},
            {"max_grad_norm": 1.0, "always_adapt": True},
        ),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_updated_in_float32(dtype):
    start, grads = seeded([(50, 40), (30,)], 1, dtype=dtype)
    narrow, wide = parameters(start), parameters([x.float() for x in start])
    lamb = Lamb(narrow, LR)
    train(lamb, grads)
    train(Lamb(wide, LR), [[g.float() for g in step] for step in grads])
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a, b.to(dtype))
        state = lamb.state[a]
        assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}


def test_stochastic_rounding_keeps_the_mean_and_replays():
    def run(**options):
        p = nn.Parameter(torch.ones(2 * CPU_PIECE + 5, dtype=torch.bfloat16))
        lamb = Lamb([p], 1e-3, weight_decay=0.0, **options)
        train(lamb, [[torch.ones_like(p)]])
        return p.detach()

    assert torch.equal(run(), torch.ones(2 * CPU_PIECE + 5, dtype=torch.bfloat16))  # lost
    rounded = run(stochastic_rounding=True)
    # The step is 1e-3, the spacing below 1 is 2^-8: a standard error of 1.7e-6 over 2^20 draws.
    assert rounded.double().mean().item() == pytest.approx(1 - 1e-3, abs=1e-5)
    assert torch.equal(rounded, run(stochastic_rounding=True))
    assert not torch.equal(rounded, run(stochastic_rounding=True, seed=1))


def test_stochastic_rounding_keeps_a_nan():
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    g = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32).bfloat16().expand(4)
    train(Lamb([p], LR, stochastic_rounding=True), [[g]])
    assert p.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_bit_equal(variant, dtype):
    rounding = dtype == torch.bfloat16
    start, grads = seeded([(50, 40), (30,), ()], 5, dtype=dtype)

    def new(values):
        return Lamb(parameters(values), LR, variant=variant, stochastic_rounding=rounding, seed=3)

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


def test_compiled_equals_uncompiled():
    start, grads = seeded([(COMPILED_MIN // 100 + 1, 100), (300, 400), (7,)], 3)
    finals = []
    for compiled in (False, True):
        lamb = Lamb(parameters(start), LR, variant="nvlamb", compile=compiled)
        finals.append(train(lamb, grads))
    assert farthest(*finals) < 1e-12


@pytest.mark.full
def test_compiled_rounds_with_the_same_noise():
    start, grads = seeded([(CPU_PIECE // 100 + 9, 100), (7,)], 2, dtype=torch.bfloat16)
    finals = []
    for compiled in (False, True):
        lamb = Lamb(parameters(start), LR, stochastic_rounding=True, compile=compiled)
        finals.append(train(lamb, grads))
    # Another order of float32 operations tips a rounding here and there, other noise half of them.
    different = [(a != b).double().mean().item() for a, b in zip(*finals, strict=True)]
    assert max(different) < 0.01


SHARD_SHAPES = [(6, 4), (3, 5), (1, 8), (2, 2)]


def _sharded_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    start, grads = seeded(SHARD_SHAPES, 4)

    def place(tensors: list[Tensor]) -> list[Tensor]:  # the last one stays whole on both ranks
        return [distribute_tensor(x, mesh, [Shard(0)]) for x in tensors[:-1]] + tensors[-1:]

    calls = []
    original = dist.all_reduce
    for variant in VARIANTS:
        params = [nn.Parameter(x) for x in place([x.clone() for x in start])]
        lamb = Lamb(params, LR, variant=variant)
        placed = [place(step) for step in grads]

        def counted(tensor: Tensor, *args, **kwargs):
            calls.append(tuple(tensor.shape))
            return original(tensor, *args, **kwargs)

        calls.clear()
        dist.all_reduce = counted
        finals = train(lamb, placed)
        dist.all_reduce = original
        vector = [(2, 3)] * 4
        assert [s for s in calls if s != ()] == vector, calls  # one a step, all tensors at once
        assert len(calls) == (8 if variant == "nvlamb" else 4)
        whole = [p.full_tensor() for p in finals[:-1]] + finals[-1:]
        if rank == 0:
            result = {"finals": whole, "ratios": lamb.trust_ratios()}
            torch.save(result, os.path.join(folder, f"{variant}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def test_sharded_over_two_processes_equals_one():
    start, grads = seeded(SHARD_SHAPES, 4)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_sharded_worker, args=(folder,), nprocs=2)
        for variant in VARIANTS:
            lamb = Lamb(parameters(start), LR, variant=variant)
            finals = train(lamb, grads)
            sharded = torch.load(os.path.join(folder, f"{variant}.pt"), weights_only=True)
            assert farthest(finals, sharded["finals"]) < 1e-10
            assert sharded["ratios"] == pytest.approx(lamb.trust_ratios(), rel=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "apex"}, "variant"),
        ({"always_adapt": True}, "always_adapt"),
        ({"stochastic_rounding": True}, "bfloat16"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Lamb([nn.Parameter(torch.ones(2))], LR, **options)
