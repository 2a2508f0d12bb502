"""What really runs in which dtype, and what 16-bit weights keep and lose."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pennyclip.checkpoint import checkpoints
from pennyclip.config import Checkpointing, ClipText, Config, LossScaling, ModulePrecision, Stage
from pennyclip.config_file import load_recipe, read_toml, to_toml
from pennyclip.errors import RequestError
from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import freeze
from pennyclip.narrow import narrowed, round_weights
from pennyclip.optim import OPTIMIZERS
from pennyclip.optim.groups import parameter_groups
from pennyclip.precision import assign, check_precision, choose, lr_scale, own_precisions
from pennyclip.scaling import LossScaler
from pennyclip.telemetry.metrics import read_metrics
from pennyclip.train import resume, train
from pennyclip.update import update
from small_runs import small_run
from update_batches import adamw, gradients, pairs, tiny_clip, weights

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


# Weights and gradients in 16 bits.


@pytest.mark.parametrize(("precision", "dtype"), [("pure-bf16", BF16), ("pure-fp16", FP16)])
def test_weights_and_gradients_have_16_bits_while_gradients_are_computed(
    precision: Any, dtype: torch.dtype
) -> None:
    model, found = tiny_clip(), {}
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name, p=p: found.setdefault(name, (p.dtype, g.dtype)) and g)
    with spying(model) as seen:
        one(model, pairs(4), precision=precision)
    assert found.pop("logit_scale") == (FP32, FP32)
    assert set(found) == {n for n, _ in model.named_parameters()} - {"logit_scale"}
    assert set(found.values()) == {(dtype, dtype)}
    assert all(p.dtype == p.grad.dtype == FP32 for p in model.parameters())
    layers = {n for n in seen if n.endswith(("fc1", "norm1", "patch_embed.proj", "c_fc", "ln_1"))}
    assert len(layers) == 2 * 2 + 1 + 2 * 2
    assert all(seen[name] == {dtype} for name in layers)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_move_as_float32_weights_would_on_the_same_gradients(name: str) -> None:
    """Ten updates: the optimizer sees float32 gradients and float32 weights, nothing else."""
    model = tiny_clip()
    twin = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    from pennyclip.config import Optim

    config = Optim(lr=1e-3)
    mine = OPTIMIZERS[name](parameter_groups(model.named_parameters(), {}, config), config)
    other = OPTIMIZERS[name](parameter_groups(twin.items(), {}, config), config)
    for number in range(10):
        one(model, pairs(4, number), optimizer=mine)
        for n, gradient in gradients(model).items():
            twin[n].grad = gradient
        assert all(
            torch.equal(g, g.bfloat16().float()) for g in gradients(model).values() if g.ndim
        )
        other.step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p, twin[n], rtol=0, atol=0)
        for value in mine.state[p].values():
            assert not torch.is_tensor(value) or value.dtype == FP32
    moved = [p for p in model.parameters() if p.ndim > 1]
    assert not any(torch.equal(p, p.bfloat16().float()) for p in moved)


def test_small_steps_that_bfloat16_would_lose_add_up_in_masters() -> None:
    model = tiny_clip()
    p = model.visual.head.proj.weight
    before = p.detach().clone()
    optimizer = adamw(model, lr=1e-6)  # Adam's steps: far below 1/512 of a weight of 0.07
    for number in range(8):
        one(model, pairs(4, number), optimizer=optimizer)
    moved = (p - before).abs()
    assert (p.bfloat16() == before.bfloat16()).float().mean() > 0.95
    assert moved.median() > 1e-6


def test_the_gradient_is_that_of_float32_within_16_bits() -> None:
    found = {}
    for precision in ("fp32", "pure-bf16", "pure-fp16"):
        model = tiny_clip()
        one(model, pairs(6), precision=precision)
        found[precision] = torch.cat([g.flatten() for g in gradients(model).values()])
    exact = found["fp32"]
    errors = {name: float((g - exact).norm() / exact.norm()) for name, g in found.items()}
    assert 1e-3 < errors["pure-bf16"] < 0.05
    assert 1e-4 < errors["pure-fp16"] < 0.007


def test_an_error_inside_gives_the_masters_back() -> None:
    model = tiny_clip()
    before = weights(model)
    broken = pairs(4, images=torch.zeros(4, 3, 65, 65, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="65"):
        one(model, broken, precision="pure-fp16")
    assert all(torch.equal(v, before[n]) and v.dtype == FP32 for n, v in weights(model).items())


def test_micro_batches_add_up_in_float32() -> None:
    """48 of them: in bfloat16, what comes last would hardly count any more."""
    whole, parts = tiny_clip(), tiny_clip()
    batch = pairs(48)
    one(whole, batch, precision="fp32")
    one(parts, batch, micro_batch=1)
    reference, found = gradients(whole), gradients(parts)
    worst = max(
        float((found[n] - g).norm() / g.norm()) for n, g in reference.items() if g.norm() > 1e-4
    )
    assert worst < 0.06
    assert any(not torch.equal(g, g.bfloat16().float()) for g in found.values())


@pytest.mark.parametrize(
    "trunk",
    [
        "efficientnet_lite0",
        "convnext_atto",
        "eva02_tiny_patch14_224",
        "resnet18",
        "vit_tiny_patch16_224",
    ],
)
def test_all_kinds_of_trunks_run_in_it(trunk: str) -> None:
    from pennyclip.config import ImageTower, Model

    torch.manual_seed(0)
    size = 56 if "eva" in trunk else 64
    image = ImageTower(name=trunk, image_size=size, head="mlp")
    text = ClipText(width=32, heads=2, layers=1, context_length=16, vocab_size=100)
    model = CLIP(Model(image=image, text=text, embed_dim=24)).train()
    images = torch.randint(256, (4, 3, size, size), dtype=torch.uint8)
    with spying(model) as seen:
        record = one(model, pairs(4, images=images))
    assert math.isfinite(record["loss"])
    dtypes = {n: s for n, s in seen.items() if n.startswith("visual.trunk")}
    norms = {n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert all(s == {BF16} for n, s in dtypes.items() if n not in norms)
    for name in norms:
        module = model.get_submodule(name)
        assert module.running_var.dtype == module.weight.dtype == FP32
        assert module.num_batches_tracked == 1


def test_a_transformers_text_tower_runs_in_it() -> None:
    from pennyclip.weights.build import build

    recipe = load_recipe("frozen-lite0-minilm")
    model, _ = build(recipe.model, 0, 1 / 0.07, 0.0)
    freeze(model, "none", 1)
    stored = {
        "image_features": torch.randn(4, 1280, generator=torch.Generator().manual_seed(0)),
        "tokens": torch.randint(1000, 20_000, (4, 16)),
    }
    narrow = set()
    model.visual.trunk.conv_stem.weight.requires_grad_(False)
    with spying(model) as seen:
        p = model.visual.trunk.conv_stem.weight
        model.text.proj.register_forward_hook(lambda *_: narrow.add(p.dtype))
        record = one(model, pairs(4, **stored))
    assert math.isfinite(record["loss"])
    assert narrow == {FP32}  # an idle trunk is not cast in every update
    layers = {n for n in seen if isinstance(model.get_submodule(n), nn.Linear | nn.LayerNorm)}
    assert len(layers) > 6 * 8
    assert all(seen[name] == {BF16} for name in layers)
    assert seen["visual.head.proj"] == {BF16}


# Stochastic rounding, without masters.


def test_without_masters_weights_are_bfloat16s_values_and_keep_their_mean() -> None:
    p = nn.Parameter(torch.linspace(0.5, 0.6, 7).repeat(20_000, 1))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Module()
            self.layer.weight = p

    exact = p.detach()[0].clone()
    round_weights(Holder(), "pure-bf16", seed=3)
    assert torch.equal(p, p.bfloat16().float())
    step = 2.0**-8  # between two bfloat16 values in [0.5, 1)
    assert ((p - exact).abs() < step).all()
    assert ((p.mean(0) - exact).abs() < 5 * step / 2 / 20_000**0.5).all()
    again = nn.Parameter(exact.repeat(20_000, 1))
    holder = Holder()
    holder.layer.weight = again
    round_weights(holder, "pure-bf16", seed=3)
    assert torch.equal(again, p)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_steps_far_below_a_weights_spacing_are_made_on_average(name: str) -> None:
    from pennyclip.config import Optim

    model = tiny_clip()
    config = Optim(lr=2e-5, weight_decay=0.0)
    optimizer = OPTIMIZERS[name](parameter_groups(model.named_parameters(), {}, config), config)
    p = model.text.token_embedding.weight
    p.data = torch.full_like(p, 0.5)  # neighbours: 0.498 and 0.504
    with torch.no_grad():
        p.copy_(p.bfloat16().float())
    generator = torch.Generator().manual_seed(0)
    for number in range(4):
        for q in model.parameters():
            q.grad = torch.randn(q.shape, generator=generator).abs()
        optimizer.step()
        round_weights(model, "pure-bf16", seed=number)
    assert torch.equal(p, p.bfloat16().float())
    drift = (p.detach() - 0.5).mean().item()
    assert drift < 0
    if name == "adamw":  # each step is the rate, up to what Adam makes of |g|
        assert 4 * 2e-5 * 0.7 < -drift < 4 * 2e-5 * 1.2
    assert model.logit_scale.dtype == FP32


def test_masters_are_really_gone() -> None:
    model = tiny_clip()
    p = model.visual.head.proj.weight
    fine = p.detach().clone()
    frozen = model.text.positional_embedding.requires_grad_(False)
    kept = frozen.detach().clone()
    with narrowed(model, "pure-bf16", masters=False):
        assert p.dtype == frozen.dtype == BF16
    assert torch.equal(p, fine.bfloat16().float())
    assert not torch.equal(p, fine)
    assert torch.equal(frozen, kept)  # what does not learn loses nothing


# Modules with a precision of their own.


def choices(**patterns: Any) -> list[ModulePrecision]:
    return [ModulePrecision(modules=m, precision=p) for m, p in patterns.items()]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "pure-bf16", "pure-fp16"])
@pytest.mark.parametrize("own", ["fp32", "bf16", "fp16"])
def test_a_named_module_really_computes_in_its_own_dtype(precision: Any, own: Any) -> None:
    model = tiny_clip()
    mine = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
    patterns = {
        "visual.trunk.blocks.0": own,
        "text.transformer.resblocks.1.mlp.c_fc": own,
        "visual.head": own,
        "text.token_embedding": own,
    }
    assign(model, precision, choices(**patterns))
    before = weights(model)
    with spying(model) as seen:
        record = one(model, pairs(4), precision=precision)
    assert math.isfinite(record["loss"])
    assert set(seen) > {"visual.trunk.blocks.0.mlp.fc1", "visual.trunk.blocks.1.mlp.fc1"}
    base = {**mine, "pure-bf16": BF16, "pure-fp16": FP16}[precision]
    layers = ("fc1", "fc2", "qkv", "c_fc", "c_proj", "head.proj", "patch_embed.proj", "out_proj")
    for name in (n for n in seen if n.endswith(layers)):
        module_own = name.startswith(tuple(patterns))
        assert seen[name] == {mine[own] if module_own else base}, name
    assert before.keys() == weights(model).keys()
    assert all(p.dtype == FP32 for p in model.parameters())


def test_in_float32_inside_bf16_a_block_computes_what_float32_computes() -> None:
    """Its input is the 16-bit one, its weights and its own arithmetic are float32's."""
    found = {}
    for precision in ("bf16", "pure-bf16"):
        model = tiny_clip()
        assign(model, precision, choices(**{"visual.trunk.blocks.1": "fp32"}))
        block = model.visual.trunk.blocks[1]
        block.register_forward_hook(lambda m, i, o: found.update(input=i[0], output=o))
        one(model, pairs(4), precision=precision, optimizer=adamw(model, lr=1e-12))
        given, result = found["input"], found["output"]
        with torch.no_grad():
            exact = block(given.float())
        if precision == "bf16":
            torch.testing.assert_close(result, exact, rtol=1e-6, atol=1e-6)
        else:
            assert given.dtype == BF16
            assert torch.equal(result, exact.bfloat16())


def test_a_whole_tower_can_leave_the_precision() -> None:
    model, exact = tiny_clip(), tiny_clip()
    assign(model, "pure-bf16", choices(visual="fp32", text="fp32"))
    batch = pairs(4)
    a, b = one(model, batch), one(exact, batch, precision="fp32")
    assert a["loss"] == b["loss"]
    assert all(torch.equal(g, gradients(exact)[n]) for n, g in gradients(model).items())


def test_outside_of_updates_nothing_is_changed() -> None:
    """Evaluation stays in float32, and a copy of the model is a model of its own."""
    from copy import deepcopy

    model, plain = tiny_clip().eval(), tiny_clip().eval()
    assign(model, "fp32", choices(**{"visual.*": "bf16", "text": "fp16"}))
    images = pairs(2).images
    assert torch.equal(model.visual(images), plain.visual(images))
    copy = deepcopy(model)
    with torch.no_grad():
        for p in copy.parameters():
            p.zero_()
    assert model.visual(images).norm() > 0 == copy.visual(images).norm()
    with own_precisions():
        assert model.visual(images).dtype == FP32
        assert not torch.equal(model.visual(images), plain.visual(images))


def test_the_first_pattern_counts_and_an_idle_one_is_refused() -> None:
    model = tiny_clip()
    named = {"visual.trunk.blocks.0": "fp32", "visual.trunk.*": "bf16"}
    assign(model, "fp32", choices(**named))
    with spying(model) as seen:
        one(model, pairs(4), precision="fp32")
    assert seen["visual.trunk.blocks.0.attn.qkv"] == {FP32}
    assert seen["visual.trunk.blocks.1.attn.qkv"] == {BF16}
    for wrong, near in (
        ("visual.trunk.block.0", "visual.trunk.blocks"),
        ("text.positional", "text"),
    ):
        with pytest.raises(RequestError, match=f"'{wrong}'.*{near}"):
            assign(model, "fp32", choices(**{wrong: "fp32"}))
    with pytest.raises(RequestError, match=r"no module is left that matches 'visual.trunk.norm'"):
        assign(tiny_clip(), "fp32", choices(**{"visual": "bf16", "visual.trunk.norm": "fp32"}))


# What a recipe may say.


def request(dataset: Path, **changed: Any) -> Config:
    config = small_run(
        dataset,
        stages=(Stage(samples=8 * 6),),
        precision="pure-bf16",
        checkpoint=Checkpointing(every_steps=1, keep=9),
    )
    return replace(config, **changed)


def test_every_key_survives_toml(tmp_path: Path) -> None:
    own = (ModulePrecision(modules="visual.trunk.*", precision="fp32"),)
    config = request(tmp_path, precision_of=own)
    config = replace(config, optim=replace(config.optim, stochastic_rounding=True, lr_scale=0.5))
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    assert read_toml(tmp_path / "recipe.toml") == config


@pytest.mark.parametrize(
    ("precision", "optim", "message"),
    [
        ("bf16", {"stochastic_rounding": True}, "belongs to precision = pure-bf16"),
        ("pure-fp16", {"stochastic_rounding": True}, "the run's is pure-fp16"),
        ("auto", {"stochastic_rounding": True}, "the run's is auto"),
        ("fp32", {"lr_scale": 2.0}, "lr_scale = 2 would have no effect"),
        ("bf16", {"lr_scale": 0.0}, "finite number above 0"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    small_dataset: Path, tmp_path: Path, precision: Any, optim: dict[str, Any], message: str
) -> None:
    config = request(small_dataset, precision=precision)
    config = replace(config, optim=replace(config.optim, **optim))
    with pytest.raises(RequestError, match=message):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_lr_scale_is_for_16_bits_and_off_unless_asked() -> None:
    config = load_recipe("scratch-vit-tiny")
    asked = replace(config, precision="auto", optim=replace(config.optim, lr_scale=0.5))
    for precision, scale in {"fp32": 1, "tf32": 1, "bf16": 0.5, "pure-fp16": 0.5}.items():
        assert lr_scale(asked, precision) == scale
        assert lr_scale(config, precision) == 1
    check_precision(tiny_clip(), asked)


def test_pure_fp16_scales_and_skips_what_overflows() -> None:
    """The scaled gradient does not fit into 16 bits until the scale has come down."""
    model, batch = tiny_clip(), pairs(4)
    scaler = LossScaler(LossScaling(start=2.0**24))
    optimizer, before = adamw(model), weights(model)
    records = []
    for _ in range(16):
        records.append(one(model, batch, precision="pure-fp16", scaler=scaler, optimizer=optimizer))
        if records[-1]["skipped"]:
            assert all(torch.equal(v, before[n]) for n, v in weights(model).items())
    outcome = [bool(r["skipped"]) for r in records]
    assert outcome == sorted(outcome, reverse=True)
    assert 2 < sum(outcome) < 16
    assert "the gradient of" in records[0]["skipped"]["tensor"]
    assert choose("pure-fp16", torch.device("cpu"), 1).reason.endswith("slower than fp32")
    name = "visual.head.proj.weight"
    assert not torch.equal(model.get_parameter(name), before[name])


@pytest.mark.parametrize("precision", ["pure-bf16", "pure-fp16", "stochastic", "stochastic lamb"])
def test_a_resumed_run_equals_an_unbroken_one(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any
) -> None:
    config = request(small_dataset)
    stochastic, _, optimizer = precision.partition(" ")
    if stochastic == "stochastic":
        optim = replace(config.optim, stochastic_rounding=True, name=optimizer or "adamw")
        config = replace(config, optim=optim)
    else:
        config = replace(config, precision=precision)
    own = ModulePrecision(modules="visual.trunk.blocks.0", precision="fp32")
    config = replace(config, precision_of=(own,))
    train(config, tmp_path / "straight", quiet=True)
    sound, calls = LOSSES["infonce"].compute, []

    def broken(features: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise OSError("pulled the plug")
        return sound(features)

    with monkeypatch.context() as patch:
        patch.setitem(LOSSES, "infonce", replace(LOSSES["infonce"], compute=broken))
        with pytest.raises(OSError, match="plug"):
            train(config, tmp_path / "broken", quiet=True)
    resume(tmp_path / "broken", quiet=True)
    one_run, other = (checkpoints(tmp_path / name) for name in ("straight", "broken"))
    assert [c.step for c in one_run] == [c.step for c in other] == [1, 2, 3, 4, 5, 6]
    first, second = (load_file(c[-1].path / "model.safetensors") for c in (one_run, other))
    for name, value in first.items():
        assert value.dtype == FP32
        assert torch.equal(value, second[name])
    narrow = {n: torch.equal(v, v.bfloat16().float()) for n, v in first.items() if v.ndim > 1}
    if stochastic == "stochastic":
        assert {n for n, is_so in narrow.items() if not is_so} == {
            n for n in narrow if n.startswith("visual.trunk.blocks.0.")
        }
    else:
        assert not any(narrow.values())
    start = read_metrics(tmp_path / "straight" / "metrics.jsonl")[0]
    assert start["precision"]["precision"] == config.precision
