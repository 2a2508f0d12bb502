"""`bench precision`: the tables, and what 16 bits do to each module."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import pennyclip.training.loop as module_train
from pennyclip.base.errors import RequestError, RunError
from pennyclip.cli import main
from pennyclip.commands.bench import module_errors, precision
from pennyclip.commands.bench.batch_size import MIB, BatchSizes
from pennyclip.commands.bench.module_errors import measure_module_errors
from pennyclip.commands.bench.precision import Row, measure_precisions
from pennyclip.commands.bench.sizes import Ending, Size
from pennyclip.commands.bench.workbench import open_workbench
from pennyclip.config.file import to_toml
from pennyclip.config.keys import Config, LossScaling, ModulePrecision
from pennyclip.evaluation.retrieval import mean_chance
from pennyclip.training.loop import Outcome
from pennyclip.training.telemetry.metrics import Metrics
from small_runs import small_run

U = 2.0**-8  # the largest relative error of rounding to bfloat16


def recipe(dataset: Path, **changed: Any) -> Config:
    return small_run(dataset, batch_size=16, **{"precision": "bf16"} | changed)


def test_each_module_is_compared_with_float32(small_dataset: Path) -> None:
    own = (ModulePrecision(modules="visual.trunk.blocks.1", precision="fp32"),)
    found = measure_module_errors(recipe(small_dataset, precision_of=own))
    modules = {m.name: m for m in found.modules}
    first, kept = (modules[f"visual.trunk.blocks.{i}.mlp.fc1"] for i in (0, 1))
    assert first.dtype == "bf16"
    assert 0.3 * U < first.own_error < U  # of three roundings
    assert kept.dtype == "fp32"
    assert kept.own_error < 1e-6 < U / 10 < kept.error  # what came from the blocks before
    norm = modules["visual.trunk.blocks.0.norm1"]
    assert (norm.dtype, norm.own_error) == ("fp32", 0.0)
    assert (
        modules["visual.trunk.blocks.11.mlp.fc2"].error
        > modules["visual.trunk.patch_embed.proj"].error
    )
    assert all(
        m.gradient_error is not None and 0 < m.gradient_error < 0.1 for m in modules.values()
    )
    assert all(m.overflow == m.gradient_overflow == 0 for m in modules.values())
    assert found.keep == {}
    assert found.loss == pytest.approx(found.exact_loss, rel=0.02)
    assert found.loss != found.exact_loss
    assert {"text.token_embedding", "text.transformer.resblocks.0.attn", "visual.head.proj"} < set(
        modules
    )


def scaled(monkeypatch: pytest.MonkeyPatch, factors: dict[str, float]) -> None:
    """Multiply the weights of modules wherever a model is made for the bench."""

    def opened(*args: Any) -> Any:
        bench = open_workbench(*args)
        with torch.no_grad():
            for name, factor in factors.items():
                bench.model.get_parameter(f"{name}.weight").mul_(factor)
        return bench

    monkeypatch.setattr(module_errors, "open_workbench", opened)


def test_it_names_what_overflows_and_not_what_comes_after(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "text.transformer.resblocks.0.mlp.c_fc"
    scaled(monkeypatch, {name: 1e6, name.replace("c_fc", "c_proj"): 1e-6})
    found = measure_module_errors(recipe(small_dataset, precision="pure-fp16"))
    after = {m.name: m for m in found.modules}["text.ln_final"]
    assert after.overflow == 1.0
    assert set(found.keep) == {name, name.replace("c_fc", "gelu"), name.replace("c_fc", "c_proj")}
    assert "overflow" in found.keep[name]
    assert f'modules = "{name}"' in str(found)


def test_gradients_that_a_small_scale_loses_are_counted(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings 10,000 times as long have gradients as much smaller."""
    name = "visual.head.proj"
    scaled(monkeypatch, {name: 1e4})
    lost = {}
    for start in (1.0, 65536.0):
        scaling = LossScaling(start=start)
        config = recipe(small_dataset, precision="fp16", loss_scaling=scaling)
        found = measure_module_errors(config)
        assert found.loss_scale == start
        lost[start] = {m.name: m for m in found.modules}[name].gradient_underflow or 0.0
        assert (name in found.keep) == (start == 1)
    assert lost[65536.0] < 0.01
    assert lost[1.0] > 0.03


def test_fp32_is_not_compared_with_itself(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe in fp32 is shown what 16 bits would do: bf16, also where the machine emulates it."""
    monkeypatch.setattr("pennyclip.training.update.precision.has_bf16", lambda _: False)
    own = (ModulePrecision(modules="visual.trunk.blocks.1", precision="fp32"),)
    found = measure_module_errors(recipe(small_dataset, precision="fp32", precision_of=own))
    assert (found.precision, found.instead_of) == ("bf16", "fp32")
    assert 0.3 * U < {m.name: m for m in found.modules}["visual.head.proj"].own_error < U
    assert str(found).startswith("Nothing would run in 16 bits here (precision = fp32): shown is")
    assert module_errors._looked_at(recipe(small_dataset, precision="auto")) == "bf16"
    mixed = (ModulePrecision(modules="visual.trunk.blocks.1", precision="bf16"),)
    kept = recipe(small_dataset, precision="fp32", precision_of=mixed)
    assert module_errors._looked_at(kept) == "fp32"
    with pytest.raises(RequestError, match=r"precision = tf32: .* Name another: --precision bf16"):
        measure_module_errors(recipe(small_dataset, precision="tf32"))


@pytest.mark.parametrize("option", [["--among", "bf16"], ["--up-to", "8"], ["--epochs", "2"]])
def test_what_belongs_to_the_table_is_refused_beside_errors(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "precision", "scratch-vit-tiny", "--data", "x", "--errors", *option]
    assert main(command) == 2
    assert f"{option[0]} belongs to the table" in capsys.readouterr().err


def test_the_table_and_its_page(
    small_dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def sizes(config: Config, *, up_to: int | None, rounds: int) -> BatchSizes:
        asked.append((config.precision, config.optim.stochastic_rounding, up_to))
        found = (Size(8, 60 * MIB, True, 1.0), Size(16, 70 * MIB, True, 1.0))
        ended_by: Ending = "memory" if config.precision == "fp32" else "time"
        return BatchSizes(
            "a device", "bf16", "a stage", 16, 2**30, 0, found, 16, ended_by, "in words", 8
        )

    monkeypatch.setattr(precision, "measure_batch_sizes", sizes)  # has tests of its own
    (tmp_path / "recipe.toml").write_text(to_toml(recipe(small_dataset)))
    command = ["bench", "precision", str(tmp_path / "recipe.toml"), "--epochs", "0.5"]
    command += ["--among", "fp32", "pure-bf16-stochastic"]
    assert main([*command, "--out", str(tmp_path / "out"), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert asked == [("fp32", False, None), ("pure-bf16", True, None)]
    exact, rounded = tree["rows"]
    assert (exact["name"], rounded["name"]) == ("fp32", "pure-bf16-stochastic")
    runs = [tmp_path / "out" / row["name"] for row in (exact, rounded)]
    configs = [(run / "config.toml").read_text() for run in runs]
    assert "stochastic_rounding = false" in configs[0]
    assert "stochastic_rounding = true" in configs[1]
    for row, run in zip((exact, rounded), runs, strict=True):
        lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
        updates = [x for x in lines if x["kind"] == "train"]
        evaluations = [x for x in lines if x["kind"] == "eval"]
        speeds = [x["samples_per_second"] for x in updates]
        rows = updates[-1]["samples"] / updates[-1]["epoch"]
        assert rows / max(speeds) <= row["epoch_seconds"] <= rows / min(speeds)
        assert row["score"] == evaluations[-1]["metrics"]["mean_recall"]
        assert len(row["course"]) == len(evaluations) > 1
        counts = [evaluations[-1]["metrics"][name] for name in ("images", "captions")]
        assert row["chance"] == mean_chance(*counts)
        assert row["largest"] == 16
        assert row["peak_bytes"] == 70 * MIB
    assert [row["ended_by"] for row in (exact, rounded)] == ["memory", "time"]
    page = (tmp_path / "out" / "precision.html").read_text()
    assert '<td class="number">16</td><td class="number">memory</td>' in page
    assert '<td class="number">≥ 16</td><td class="number">time</td>' in page
    assert "pure-bf16-stochastic" in page
    assert "<svg" in page
    assert "extrapolated" in page
    assert f'<td class="number">{exact["chance"]:.1%}</td>' in page
    assert "Pairs to 90%: seen until the recall was 90% of the best that fp32 had" in page


def test_what_cannot_be_told_from_guessing_is_near_to_nothing(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 68 images guessing has 7.8%, and two standard errors above it is 14.3%."""

    def run(recalls: list[float], first: Row | None = None) -> Row:
        def trained(_: Config, out: Path, *, quiet: bool) -> Outcome:
            metrics = Metrics(out / "metrics.jsonl")
            for step, recall in enumerate(recalls, start=1):
                found = {"mean_recall": recall, "images": 68, "captions": 68}
                metrics.log("eval", step, split="dev", metrics=found)
            fields = {"samples": 16.0, "epoch": 1.0, "samples_per_second": 2.0, "skipped": 0}
            metrics.log("train", 1, **fields)
            metrics.close()
            return Outcome(out, len(recalls), True, None)

        monkeypatch.setattr(precision, "train", trained)
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        out.mkdir()
        return precision._run(Row("fp32"), recipe(small_dataset), out, first)[0]

    guessing, learning = run([0.10, 0.13, 0.12]), run([0.10, 0.14, 0.15])
    assert guessing.chance == pytest.approx(16 / 3 / 68)
    assert (guessing.samples_to_near, guessing.score) == (None, 0.12)
    assert learning.samples_to_near == 2 * 16
    assert run([0.15], guessing).samples_to_near is None
    assert run([0.15], learning).samples_to_near == 16
    table = precision.Precisions("a device", "a stage", 16, 1.0, 3, (guessing, learning))
    recall = table.HEADER.index("mean recall")
    assert [cells[recall : recall + 3] for cells in table.cells()] == [
        ["12.0%", "7.8%", "–"],
        ["15.0%", "7.8%", "32"],
    ]


def test_peak_memory_is_that_of_the_recipes_own_batch() -> None:
    sizes = tuple(Size(n, n * MIB, True) for n in (50, 100, 128))
    found = BatchSizes("a device", "bf16", "a stage", 100, 2**30, 0, sizes, 128, "rows", "", 50)
    assert precision._memory(Row("bf16"), found, 100).peak_bytes == 100 * MIB
    assert precision._memory(Row("bf16"), found, 120).peak_bytes is None  # not 128's


def test_a_memory_that_cannot_be_measured_costs_no_more_than_that(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sizes(config: Config, **_: object) -> BatchSizes:
        if config.precision == "fp32":
            raise RunError("measuring failed")
        return BatchSizes("a device", "bf16", "a stage", 16, 2**30, 0, (), 8, "memory", "", 8)

    monkeypatch.setattr(precision, "measure_batch_sizes", sizes)
    config = recipe(small_dataset)
    exact, other = measure_precisions(config, among=("fp32", "bf16"), epochs=0.2).rows
    assert exact.epoch_seconds is not None
    assert (exact.largest, exact.failure, other.largest) == (None, "measuring failed", 8)
    with pytest.raises(RunError, match="no precision's memory could be measured: measuring failed"):
        measure_precisions(config, among=("fp32",), epochs=0.2)


def test_unknown_and_missing_precisions_are_refused(
    small_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text(to_toml(recipe(small_dataset)))
    for name, message in (("fp8", "precision 'fp8': known are fp32"), ("tf32", "NVIDIA")):
        if name == "tf32" and torch.cuda.is_available():
            continue
        command = ["bench", "precision", str(tmp_path / "recipe.toml"), "--among", name]
        assert main(command) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--epochs", "nan"], "epochs = nan: expected a number above 0"),
        (["--up-to", "1"], "up_to = 1: expected at least 2 pairs"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_run(
    option: list[str], told: str, small_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "precision", "scratch-vit-tiny", "--data", str(small_dataset)]
    assert main([*command, *option]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "a run" not in err


def test_fp16_must_be_asked_for_on_a_cpu() -> None:
    names = precision._names((), torch.device("cpu"))
    assert names == ["fp32", "bf16", "pure-bf16", precision.ROUNDED]
    assert precision._names(("fp16",), torch.device("cpu")) == ["fp16"]


def test_a_signal_stops_all_of_it(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that gets it stops as runs do; the next precision must not begin."""
    read = module_train.Meter.read

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return read(*args)

    monkeypatch.setattr(module_train.Meter, "read", interrupted)
    (tmp_path / "recipe.toml").write_text(to_toml(recipe(small_dataset)))
    command = ["bench", "precision", str(tmp_path / "recipe.toml"), "--among", "fp32", "bf16"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 130
    assert [run.name for run in (tmp_path / "out").iterdir()] == ["fp32"]
