"""Overflows in real runs in fp16: each costs its batch and lowers the loss scale, nothing else."""

import math
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import faulty_runs
from faulty_runs import Do, do_before_each, events, named, names, trained
from pennyclip.base.errors import RunError
from pennyclip.cli import main
from pennyclip.config.file import to_toml
from pennyclip.config.keys import Checkpointing, Config, LossScaling, Stability, Stage
from pennyclip.model.clip import CLIP
from pennyclip.training.loop import train
from pennyclip.training.state import TrainState
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.weights.checkpoint import checkpoints, load_trainer
from update_batches import weights

BATCH, WARMUP, END = 8, 12, 0.1
BLOCK, HEAD = "text.transformer.resblocks.0", "visual.head.proj"
SITES = {
    (f"{BLOCK}.mlp.c_proj", "forward"): f"the output of {BLOCK}.mlp.c_proj",
    (HEAD, "backward"): f"the gradient of {HEAD}.weight",
    (f"{BLOCK}.attn.out_proj", "backward"): f"the gradient of {BLOCK}.ln_1.weight",
    (HEAD, "forward"): f"the output of {HEAD}",
}
"""A layer, in which pass it leaves float16's range, and what is then not finite first."""


def request(dataset: Path, steps: int, **changed: Any) -> Config:
    """A block of the text tower, heads and temperature learn: 15 ms an update."""
    config = faulty_runs.request(dataset, steps, precision="fp16", batch_size=BATCH)
    return replace(
        config,
        stages=(Stage(samples=BATCH * steps, image_layers="none", text_layers=1),),
        optim=replace(config.optim, lr=1e-3, warmup_steps=WARMUP, min_lr_share=END),
        **changed,
    )


def leave_float16(layer: nn.Module, where: str) -> None:
    """From now on a layer's output, or the gradient that comes back to it, is too large."""

    def hook(_: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if where == "forward":
            return output * 1e8
        if output.requires_grad:  # not while the cause is looked for
            output.register_hook(lambda gradient: gradient * math.inf)
        return None

    layer.register_forward_hook(hook)


def site(number: int) -> tuple[str, str]:
    """Of overflow `number`, from 1."""
    return list(SITES)[(number - 1) % len(SITES)]


def overflowing(pattern: list[bool]) -> Do:
    """An overflow in every batch for which the pattern says so, at each site in turn."""

    def do(number: int, model: CLIP, _: Any) -> None:
        for name, _ in SITES:
            model.get_submodule(name)._forward_hooks.clear()
        if pattern[number - 1]:
            name, where = site(sum(pattern[:number]))
            leave_float16(model.get_submodule(name), where)

    return do


class Witness:
    """Looks at a run before every update, and then lets it overflow or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pattern: list[bool]) -> None:
        self._pattern, self._overflow = pattern, overflowing(pattern)
        self.rates: list[float] = []
        """Of each step of the optimizer."""
        self.temperatures: list[float] = []
        """After each of them, the last not yet."""
        begin = TrainState.begin

        def begun(*of: Any) -> TrainState:
            self.state = begin(*of)
            return self.state

        monkeypatch.setattr(TrainState, "begin", begun)
        do_before_each(monkeypatch, self._look)

    def _look(self, number: int, model: CLIP, optimizer: torch.optim.Optimizer) -> None:
        state, learning = self.state, [p for p in model.parameters() if p.requires_grad]
        past = self._pattern[: number - 1]
        made = past.count(False)
        assert state.ema is not None
        assert (state.step, state.skipped) == (number - 1, number - 1 - made)
        assert {float(s["step"]) for s in optimizer.state.values()} == ({made} if made else set())
        assert state.ema.updates == made
        moments = [value for s in optimizer.state.values() for value in s.values()]
        for tensor in [*learning, *moments, *state.ema.average.values()]:
            assert torch.isfinite(tensor).all()
        if number == 1:
            optimizer.register_step_pre_hook(
                lambda *_: self.rates.append(optimizer.param_groups[0]["lr"])
            )
        else:
            same = [torch.equal(p, old) for p, old in zip(learning, self._before, strict=True)]
            assert all(same) if past[-1] else not any(same)
            assert [p.grad is None for p in learning] == [past[-1]] * len(learning)
        if made > len(self.temperatures):
            self.temperatures.append(float(model.logit_scale.detach()))
        for p in learning:
            if p.grad is not None:
                p.grad.fill_(math.nan)  # what is left of one update does not enter the next
        self._before = [p.detach().clone() for p in learning]
        self._overflow(number, model, optimizer)


def course(made: int, steps: int) -> float:
    """The rate's share of its peak after so many updates: linear, then a cosine."""
    if made < WARMUP:
        return (made + 1) / WARMUP
    return END + (1 - END) * (1 + math.cos(math.pi * (made - WARMUP) / (steps - WARMUP))) / 2


def loss_scales(pattern: list[bool], settings: LossScaling) -> list[float]:
    """In each batch, and after the last."""
    found, in_a_row = [settings.start], 0
    for overflow in pattern:
        in_a_row = 0 if overflow else in_a_row + 1
        lower = max(settings.floor, found[-1] * settings.backoff)
        grows = not overflow and in_a_row % settings.interval == 0
        found.append(lower if overflow else found[-1] * (settings.growth if grows else 1))
    return found


def borne(seed: int) -> list[bool]:
    """200 overflows, by chance, as close as the default patience bears: 19 of 50, 16 in a row."""
    draw, density, pattern = random.Random(seed), 1.0, list[bool]()
    while sum(pattern) < 200:
        if draw.random() < 1 / 20:
            density = draw.choice((1.0, 0.5, 0.2))
        free = sum(pattern[-49:]) < 19 and sum(pattern[-16:]) < 16
        pattern.append(free and draw.random() < density)
    return pattern


def check_lines(run: Path, lr: float, pattern: list[bool], scales: list[float]) -> list[float]:
    """What the run wrote down of every batch. Returns the rates of the updates that were made: the
    whole course, none left out, none twice."""
    lowered = {e["step"]: e["lr_factor"] for e in events(run) if e["name"] == "rate reduced"}
    rates, factor = list[float](), 1.0
    for line, overflow, scale in zip(trained(run), pattern, scales[:-1], strict=True):
        rate = lr * course(len(rates), len(pattern)) * factor
        assert all(value == pytest.approx(rate, rel=1e-12) for value in line["lr"].values())
        if not overflow:
            rates.append(rate)
        assert line["skipped"] == line["overflows"] == line["step"] - len(rates)
        assert line["loss_scale"] == scale
        factor = lowered.get(line["step"], factor)
    return rates


def check_checkpoints(
    run: Path, pattern: list[bool], scales: list[float], temperatures: list[float]
) -> None:
    """What it saved."""
    for checkpoint in checkpoints(run):
        raw, mean = (load_file(checkpoint.path / f"{n}.safetensors") for n in ("model", "ema"))
        assert all(torch.isfinite(value).all() for value in [*raw.values(), *mean.values()])
        trainer, step = load_trainer(checkpoint), checkpoint.step
        made = pattern[:step].count(False)
        assert {float(s["step"]) for s in trainer["optimizer"].values()} == ({made} - {0})
        assert trainer["ema"]["updates"] == made
        assert trainer["skipped"] == trainer["scaler"]["overflows"] == step - made
        assert trainer["scaler"]["scale"] == scales[step]
    assert step == len(pattern)
    after = [*temperatures, float(raw["logit_scale"])][:made]
    average = after[0]
    for n, value in enumerate(after):
        average += (1 - min(0.9, (1 + n) / (10 + n))) * (value - average)
    assert float(mean["logit_scale"]) == pytest.approx(average, abs=1e-5)


PATTERNS = {
    "170 in a row, and 30 at the end": ([True] * 170 + [False] * 24 + [True] * 30, 171),
    "bursts of 16": ([n % 24 < 16 for n in range(296)], 201),
    "any": (random.Random(0).sample([True] * 200 + [False] * 160, 360), 201),
    "as the default patience bears": (borne(0), LossScaling.patience),
}


@pytest.mark.parametrize(("pattern", "patience"), PATTERNS.values(), ids=PATTERNS)
def test_200_overflows_cost_a_batch_each_and_nothing_else(
    pattern: list[bool],
    patience: int,
    small_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    config = request(
        small_dataset,
        len(pattern),
        ema_decay=0.9,
        loss_scaling=LossScaling(
            start=2.0**12, growth=4.0, backoff=0.5, interval=5, floor=2.0, patience=patience
        ),
        stability=Stability(rate_factor=0.95),  # 0.3 stops at the 20th that stands alone
        checkpoint=Checkpointing(every_steps=50),
    )
    witness = Witness(monkeypatch, pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(config, run, quiet=True)

    skips = [e for e in events(run) if e["name"] == "update skipped"]
    assert [e["step"] for e in skips] == [n for n, bad in enumerate(pattern, 1) if bad]
    assert [e["tensor"] for e in skips] == [SITES[site(n)] for n in range(1, 201)]
    assert set(names(run)) <= {"update skipped", "rate reduced"}
    scales = loss_scales(pattern, config.loss_scaling)
    assert min(scales) == config.loss_scaling.floor
    rates = check_lines(run, config.optim.lr, pattern, scales)
    assert witness.rates == pytest.approx(rates, rel=1e-12)
    losses = [float(r["loss"]) for r, bad in zip(trained(run), pattern, strict=True) if not bad]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    check_checkpoints(run, pattern, scales, witness.temperatures)


PAIRS = [False] * 10 + [n % 5 < 2 for n in range(90)]
SINGLES = [False] * 10 + [n % 2 == 0 for n in range(90)]


@pytest.mark.parametrize(
    ("pattern", "end", "message"),
    [
        (
            PAIRS,
            57,
            r"no update could be made from 20 of the last 50 batches.*finite: the output of "
            rf"{BLOCK}.mlp.c_proj in batch 11; the loss scale is down to 1\. bf16",
        ),
        (
            SINGLES,
            49,
            r"every learning rate was lowered to 0\.027 of its schedule, and would have to be "
            r"again: 5 of the last 100 batches overflowed at a loss scale that had held before",
        ),
    ],
    ids=["2 of 5", "every other"],
)
def test_a_run_that_keeps_overflowing_is_stopped(
    pattern: list[bool],
    end: int,
    message: str,
    small_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20 of 50 are too many, where 19 are not; so are 20 that the rate may be to blame for."""
    config = request(
        small_dataset,
        len(pattern),
        ema_decay=0.9,
        loss_scaling=LossScaling(start=2.0**12),
        stability=Stability(rollbacks=0),
    )
    assert sum(pattern[:end]) == 20
    witness = Witness(monkeypatch, pattern)
    with pytest.raises(RunError, match=message):
        train(config, tmp_path / "run", quiet=True)
    assert named(tmp_path / "run", "stopped")["step"] == end
    assert len(witness.rates) == end - 20
    assert all(torch.isfinite(value).all() for value in witness.state.model.state_dict().values())


@pytest.mark.parametrize(
    "at", [(f"{BLOCK}.mlp.c_proj", "forward"), (HEAD, "backward")], ids=["forward", "backward"]
)
def test_17_overflows_in_a_row_bring_the_scale_to_1_and_end_the_run_with_1(
    at: tuple[str, str],
    small_dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Case 5 of the ten with known answers, with its own figures: they are the defaults."""
    begun, tensor = dict[str, Any](), SITES[at]

    def do(number: int, model: CLIP, optimizer: torch.optim.Optimizer) -> None:
        if number == 1:
            begun.update(model=model, optimizer=optimizer, weights=weights(model))
            leave_float16(model.get_submodule(at[0]), at[1])

    do_before_each(monkeypatch, do)
    config = request(small_dataset, 40, checkpoint=Checkpointing(every_steps=4, keep=9))
    assert (config.loss_scaling.start, config.loss_scaling.patience) == (65_536, 17)
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(to_toml(config))
    assert main(["train", str(recipe), "--out", str(run)]) == 1

    error = " ".join(capsys.readouterr().err.split())
    assert "no update could be made from 17 batches in a row" in error
    assert f"what was not finite: {tensor} in batch 1; the loss scale is down to 1. bf16" in error
    scales = [line["loss_scale"] for line in trained(run)]
    assert scales == [2.0 ** (16 - n) for n in range(17)]
    skips = [event for event in events(run) if event["name"] == "update skipped"]
    assert {event["tensor"] for event in skips} == {tensor}
    assert [event["loss_scale_after"] for event in skips] == [*scales[1:], 1.0]
    assert trained(run)[-1]["overflows"] == trained(run)[-1]["skipped"] == len(skips) == 17
    first, *_, last = read_metrics(run / "metrics.jsonl")
    assert first["precision"]["precision"] == "fp16"
    assert first["precision"]["reason"].startswith("as asked")
    assert (last["kind"], last["reason"], last["step"]) == ("end", "error", 17)

    saved = [load_file(c.path / "model.safetensors") for c in checkpoints(run)]
    assert [c.step for c in checkpoints(run)] == [4, 8, 12, 16]
    for state in (begun["model"].state_dict(), *saved):
        assert all(torch.equal(value, begun["weights"][name]) for name, value in state.items())
    assert not begun["optimizer"].state
