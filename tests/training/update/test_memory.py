"""What running out of memory looks like, and that a run goes on in less of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pennyclip.base.errors import RunError
from pennyclip.config.keys import Checkpointing
from pennyclip.loss import LOSSES
from pennyclip.model.image import ImageTower
from pennyclip.training.loop import resume, train
from pennyclip.training.telemetry.metrics import read_metrics
from pennyclip.training.update import memory
from pennyclip.training.update.memory import available, peak, ran_out, reset_peak
from pennyclip.training.update.update import update
from pennyclip.weights.checkpoint import checkpoints, load_trainer
from small_runs import small_run
from update_batches import adamw, gradients, pairs, tiny_clip, weights

USUAL: dict[str, Any] = {"clip_norm": 1.0, "precision": "fp32", "seed": 5}
CPU = torch.device("cpu")
MIB = 2**20


def no_room() -> RuntimeError:
    """What torch's CPU allocator says of more than there can ever be."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    return caught.value


class Narrow(nn.Module):
    """Lets batches of at most `most` pass, as memory would."""

    def __init__(self, most: int, error: RuntimeError) -> None:
        super().__init__()
        self.most, self.error, self.refused = most, error, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            self.refused.append(len(x))
            raise self.error
        return x


def test_what_an_allocator_says_is_recognised() -> None:
    assert ran_out(no_room())
    assert ran_out(torch.OutOfMemoryError("CUDA out of memory."))
    assert not ran_out(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_available_memory_is_the_systems_or_the_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "none")
    whole = available(CPU)
    lines = Path("/proc/meminfo").read_text().split()
    told = 1024 * int(lines[lines.index("MemAvailable:") + 1])
    assert whole == pytest.approx(told, rel=0.2)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert available(CPU) == pytest.approx(whole, rel=0.2)
    (tmp_path / "memory.max").write_text(f"{3 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2 * 2**20}\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1024\nactive_file 7\n")
    assert available(CPU) == 2**20 + 1024


def test_a_peak_counts_from_where_it_was_reset() -> None:
    """200 MiB before leave no trace, in one piece or in a thousand; 50 MiB after do."""
    pieces = [torch.ones(50 * MIB), *(torch.ones(MIB // 20) for _ in range(1000))]
    high = peak(CPU)
    del pieces
    assert peak(CPU) == pytest.approx(high, abs=MIB)  # a high-water mark
    reset_peak(CPU)
    before = peak(CPU)
    assert high - before > 350 * MIB
    used = torch.ones(50 * MIB // 4)
    del used
    assert peak(CPU) - before == pytest.approx(50 * MIB, abs=2 * MIB)


@pytest.mark.parametrize("error", [no_room(), torch.OutOfMemoryError("CUDA out of memory.")])
def test_the_micro_batch_is_halved_until_it_fits(error: RuntimeError) -> None:
    """And the update is the one that the whole batch would have made."""
    model, expected = tiny_clip(), tiny_clip()
    narrow = Narrow(2, error)
    model.visual.head.register_forward_hook(lambda _, __, out: narrow(out))
    record = update(model, LOSSES["infonce"], adamw(model), pairs(7), **USUAL)
    assert narrow.refused == [7, 3]
    assert record["micro_batch"] == 1
    assert "with 7 pairs in the towers at a time: from here on 1" in record["shortage"]
    plain = update(expected, LOSSES["infonce"], adamw(expected), pairs(7), **USUAL)
    assert (plain["micro_batch"], plain["shortage"]) == (7, None)
    assert float(record["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-6)
    found, whole = gradients(model), gradients(expected)
    for name, value in whole.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm().clamp(min=1e-4), name


def test_it_may_run_out_in_the_second_pass() -> None:
    """Where some gradients are there already: they must not count twice."""
    model, expected, calls = tiny_clip(), tiny_clip(), 0

    def fail_once(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # two micro-batches without a graph, one with, and now
            raise no_room()

    model.visual.head.register_forward_hook(fail_once)
    record = update(model, LOSSES["infonce"], adamw(model), pairs(8), **USUAL, micro_batch=4)
    assert record["micro_batch"] == 2
    update(expected, LOSSES["infonce"], adamw(expected), pairs(8), **USUAL)
    found, whole = gradients(model), gradients(expected)
    for name, value in whole.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm().clamp(min=1e-4), name


def test_where_no_micro_batch_helps_nothing_is_changed() -> None:
    model = tiny_clip()
    before = weights(model)
    handle = model.visual.head.register_forward_hook(lambda _, __, out: Narrow(0, no_room())(out))
    with pytest.raises(RunError, match=r"with 1 of the 4 pairs.*not even one pair fits"):
        update(model, LOSSES["infonce"], adamw(model), pairs(4), **USUAL)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    handle.remove()
    other = RuntimeError("some other trouble")
    model.visual.head.register_forward_hook(lambda _, __, out: Narrow(0, other)(out))
    with pytest.raises(RuntimeError, match="some other trouble"):
        update(model, LOSSES["infonce"], adamw(model), pairs(4), **USUAL)


def test_batch_norm_in_training_mode_stops_with_the_remedy() -> None:
    model = tiny_clip(image="tf_efficientnet_lite0")
    model.visual.head.register_forward_hook(lambda _, __, out: Narrow(4, no_room())(out))
    with pytest.raises(RunError, match=r"\d+ BatchNorm layers.*start from weights"):
        update(model, LOSSES["infonce"], adamw(model), pairs(8), **USUAL)


def test_the_optimizers_own_shortage_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_clip()
    optimizer = adamw(model)

    def fail(*_: Any) -> None:
        raise no_room()

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RunError, match=r"in the optimizer's step.*go on from the last checkpoint"):
        update(model, LOSSES["infonce"], optimizer, pairs(4), **USUAL)


def test_a_run_goes_on_and_keeps_the_smaller_micro_batch(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out at step 2; the run is resumed from there and finishes as it would have."""
    config = small_run(small_dataset, checkpoint=Checkpointing(every_steps=2))
    train(config, tmp_path / "plain", quiet=True)
    passes, features = [], ImageTower.features

    def narrow(self: ImageTower, images: Tensor, keep: Tensor | None = None) -> Tensor:
        if not self.training:  # an evaluation
            return features(self, images, keep)
        if len(images) > 4 and len(passes) >= 1:
            raise no_room()
        passes.append(len(images))
        if len(passes) == 8:
            raise KeyboardInterrupt  # after step 2 was saved: 1 + 4 + 3 passes
        return features(self, images, keep)

    monkeypatch.setattr(ImageTower, "features", narrow)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", quiet=True)
    assert passes == [8, *[4] * 7]
    saved = checkpoints(tmp_path / "run")[-1]
    assert (saved.step, load_trainer(saved)["micro_batch"]) == (2, 4)
    resume(tmp_path / "run", quiet=True)
    assert set(passes[8:]) == {4}  # no attempt with 8
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    events = [r for r in records if r["kind"] == "event"]
    assert [(e["name"], e["step"]) for e in events] == [("out of memory", 2)]
    lines = [r for r in records if r["kind"] == "train"]
    assert [r["micro_batch"] for r in lines] == [8, 4, 4, 4]
    plain = [r for r in read_metrics(tmp_path / "plain/metrics.jsonl") if r["kind"] == "train"]
    for one, other in zip(plain, lines, strict=True):
        for key in ("loss", "grad_norm", "logit_scale"):
            assert other[key] == pytest.approx(one[key], rel=1e-5)
