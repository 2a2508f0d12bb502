"""One update: what runs in which dtype, what is refused, what is named."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Config, ImageTower, LossScaling, Model, ModulePrecision, Precision
from pennyclip.loss import LOSSES, Features, Loss
from pennyclip.training.update import precision as policies
from pennyclip.training.update.precision import Choice, autocast, choose, float32_products, has_bf16
from pennyclip.training.update.scaling import make_scaler
from pennyclip.training.update.update import update
from update_batches import adamw, gradients, pairs, tiny_clip, weights

CPU = torch.device("cpu")
USUAL: dict[str, Any] = {"clip_norm": 1.0, "precision": "fp32"}


@pytest.mark.parametrize(
    ("device", "fast", "parameters", "expected", "why"),
    [
        ("cpu", True, 10**7, "bf16", "computes in bf16"),
        ("cuda", True, 10**7, "bf16", "computes in bf16"),
        ("cuda", False, 2 * 10**9, "fp16", "the loss is scaled"),
        ("cuda", False, 2 * 10**9 + 1, "bf16", "2.0 B parameters need bf16's range"),
        ("cpu", False, 5 * 10**9, "bf16", "5.0 B parameters"),
        ("cpu", False, 10**7, "fp32", "neither"),
    ],
)
def test_auto_goes_by_hardware_and_size(
    device: str,
    fast: bool,
    parameters: int,
    expected: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "has_bf16", lambda device: fast)
    choice = choose("auto", torch.device(device), parameters)
    assert choice.precision == expected
    assert why in choice.reason


def test_a_precision_that_was_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "has_bf16", lambda device: True)
    assert choose("bf16", CPU, 10**10) == Choice("bf16", "as asked")
    assert choose("tf32", torch.device("cuda"), 1) == Choice("tf32", "as asked")
    assert "emulates it" in choose("fp16", CPU, 1).reason
    with pytest.raises(RequestError, match=r"compute capability 8\.0.*this CPU"):
        choose("tf32", CPU, 1)
    monkeypatch.setattr(policies, "has_bf16", lambda device: False)
    with pytest.raises(RequestError, match="this CUDA"):
        choose("tf32", torch.device("cuda"), 1)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True)])
def test_gpus_have_bf16_from_8_0_on(
    capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_bf16(torch.device("cuda")) == expected


def test_cpus_have_bf16_where_their_flags_say_so() -> None:
    file = Path("/proc/cpuinfo")
    if not file.is_file() or "flags" not in file.read_text():
        pytest.skip("no x86 Linux")
    flags = file.read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    assert has_bf16(CPU) == ("avx512_bf16" in flags or "amx_tile" in flags)


def test_tf32_stays_inside() -> None:
    def state() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = state()
    with float32_products(tf32=True):
        assert state() == ("high", True)
        with float32_products(tf32=False):
            assert state() == ("highest", False)
        assert state() == ("high", True)
    assert state() == before


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_norms_take_their_statistics_in_float32(precision: str) -> None:
    """The squares of these inputs do not fit into float16, their sums not into bfloat16."""
    with autocast(precision, CPU):
        x = F.linear(torch.eye(64) * 40 + 700, torch.eye(64))
        assert x.dtype == policies.AUTOCAST[precision]
        found = torch.nn.LayerNorm(64)(x).float()
    expected = F.layer_norm(x.double(), (64,))
    assert torch.allclose(found.double(), expected, rtol=2**-7, atol=2**-7)
    assert expected.abs().max() > 7


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loss_and_the_temperature_are_float32(precision: str) -> None:
    seen: dict[str, Any] = {}

    def compute(features: Features) -> tuple[Tensor, dict[str, float | Tensor]]:
        seen.update(vars(features))
        seen["product"] = features.image @ features.text.T
        return LOSSES["infonce"].compute(features)

    model = tiny_clip()
    update(model, Loss(compute, 1.0, 100.0), adamw(model), pairs(4), **USUAL | {
        "precision": precision
    })  # fmt: skip
    for name in ("image", "text", "scale", "product"):
        assert seen[name].dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_tower_without_gradient_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_clip()
    optimizer, before = adamw(model), weights(model)
    features = model.text.features
    monkeypatch.setattr(model.text, "features", lambda *inputs: features(*inputs).detach())
    with pytest.raises(RequestError, match=r"in the text tower: text\.positional_embedding"):
        update(model, LOSSES["infonce"], optimizer, pairs(4), **USUAL)
    monkeypatch.undo()
    model.visual.head.requires_grad_(False)
    with pytest.raises(RequestError, match=r"1 of \d+ .* in the image tower: visual\.head\.proj"):
        update(model, LOSSES["infonce"], optimizer, pairs(4), **USUAL)
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_tensor_that_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_clip()
    optimizer, before = adamw(model), weights(model)

    batch = pairs(4)

    def skipped() -> dict[str, Any]:
        found = update(model, LOSSES["infonce"], optimizer, batch, **USUAL)["skipped"]
        assert not optimizer.state
        return found

    name = "text.transformer.resblocks.1.ln_2.bias"
    hook = model.get_parameter(name).register_hook(lambda gradient: gradient * math.nan)
    assert skipped() == {"tensor": f"the gradient of {name}", "rows": [0, 1, 2, 3]}
    hook.remove()
    project = model.text.project
    monkeypatch.setattr(model.text, "project", lambda features: math.inf * project(features))
    assert skipped() == {"tensor": "the text embedding", "rows": [0, 1, 2, 3]}
    monkeypatch.undo()

    def white_is_too_much(_: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        white = inputs[0].flatten(1).min(1).values > 0.9
        return output.masked_fill(white[:, None, None], math.inf)

    assert batch.images is not None
    batch.images[2] = 255
    hook = model.visual.trunk.patch_embed.register_forward_hook(white_is_too_much)
    assert skipped() == {"tensor": "the output of visual.trunk.patch_embed", "rows": [2]}
    hook.remove()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.get_parameter(name)[3] = math.inf
    assert skipped()["tensor"] == f"the weight {name}"


def test_gradients_are_clipped_to_the_norm_and_no_longer_gradient_is_made() -> None:
    model = tiny_clip()
    long = update(model, LOSSES["infonce"], adamw(model, 0.0), pairs(4), **USUAL)
    assert long["grad_norm"] > 2
    squares = sum(g.double().square().sum() for g in gradients(model).values())
    assert float(squares) == pytest.approx(1.0, rel=1e-4)
    short = USUAL | {"clip_norm": 2 * float(long["grad_norm"])}
    again = update(model, LOSSES["infonce"], adamw(model, 0.0), pairs(4), **short)
    squares = sum(g.double().square().sum() for g in gradients(model).values())
    assert again["grad_norm"] == long["grad_norm"]
    assert float(squares) ** 0.5 == pytest.approx(float(long["grad_norm"]), rel=1e-4)


def test_loss_scaling_that_would_do_nothing_is_refused() -> None:
    config = Config(model=Model(image=ImageTower(name="x")), stages=())
    assert make_scaler(config, "fp32") is None
    changed = replace(config, loss_scaling=LossScaling(start=8.0))
    with pytest.raises(RequestError, match="loss_scaling would have no effect"):
        make_scaler(changed, "fp32")
    scaler = make_scaler(replace(changed, precision="auto"), "fp16")
    assert scaler is not None
    assert scaler.scale == 8.0
    assert make_scaler(replace(changed, precision="auto"), "bf16") is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure-bf16"])
def test_the_loss_is_scaled_where_one_module_computes_in_fp16(precision: Precision) -> None:
    config = Config(
        model=Model(image=ImageTower(name="x")),
        stages=(),
        precision=precision,
        precision_of=(ModulePrecision(modules="visual.head", precision="fp16"),),
        loss_scaling=LossScaling(start=8.0),
    )
    scaler = make_scaler(config, precision)
    assert scaler is not None
    assert scaler.scale == 8.0
    module = ModulePrecision(modules="visual.head", precision="fp32")
    with pytest.raises(RequestError, match="loss_scaling would have no effect"):
        make_scaler(replace(config, precision_of=(module,)), precision)
