"""The rate finder: its rule on made-up curves, the whole on a small model; published settings."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import timm

from pennyclip.base.errors import RequestError, RunError
from pennyclip.cli import main
from pennyclip.commands.bench.rate import HIGH, LOW, find_rate, smoothed, suggest
from pennyclip.config.file import load_recipe
from pennyclip.config.keys import Optim, Precision, Stage
from pennyclip.config.presets import FAR, PRESETS, beginning, nearest
from pennyclip.optim import OPTIMIZERS
from small_runs import small_run


def test_smoothing_keeps_straight_lines_and_the_ends() -> None:
    line = [0.5 * n for n in range(20)]
    assert smoothed(line) == pytest.approx(line)
    jump = [0.0] * 10 + [7.0] + [0.0] * 10
    assert smoothed(jump)[7:14] == pytest.approx([1.0] * 7)
    assert smoothed(jump)[6] == smoothed(jump)[14] == 0.0


def curve(best: float, noise: float = 0.0) -> tuple[list[float], list[float]]:
    """A loss that falls to its lowest at the factor `best`, and climbs behind it."""
    factors = [LOW * (HIGH / LOW) ** (n / 99) for n in range(100)]
    losses = [
        2.0 + 0.2 * math.log10(f / best) ** 2 + noise * (-1) ** n for n, f in enumerate(factors)
    ]
    return factors, losses


@pytest.mark.parametrize("best", [0.1, 1.0, 10.0])
def test_a_tenth_of_the_lowest_is_suggested(best: float) -> None:
    factors, losses = curve(best, noise=0.02)
    factor, finding = suggest(factors, losses, smoothed(losses))
    assert factor == pytest.approx(best / 10, rel=0.3)
    assert "a tenth of the lowest" in finding


@pytest.mark.parametrize("best", [60.0, 1e4])
def test_a_loss_that_does_not_climb_in_the_end_suggests_nothing(best: float) -> None:
    factors, losses = curve(best, noise=0.02)
    factor, finding = suggest(factors, losses, smoothed(losses))
    assert factor is None
    assert "at the end, 1e+02 times" in finding
    assert "Keep the recipe's" in finding


def test_a_loss_that_never_falls_suggests_nothing() -> None:
    factors, _ = curve(1.0)
    losses = [2.0 + 0.3 * (-1) ** n for n in range(100)]
    factor, finding = suggest(factors, losses, smoothed(losses))
    assert factor is None
    assert "never fell clearly" in finding


def test_the_suggestion_depends_little_on_the_recipes_rate(small_dataset: Path) -> None:
    """A recipe with 30 times the rate reaches it with less behind it; the finding is close."""
    config = small_run(small_dataset, batch_size=16)
    rates = []
    for lr in (5e-4, 1.5e-2):
        found = find_rate(replace(config, optim=replace(config.optim, lr=lr)), updates=60)
        assert found.factors[0] == LOW
        assert found.lr == lr
        assert found.suggested_factor is not None
        assert set(found.suggested_rates) == {"image", "text", "heads", "temperature"}
        assert found.suggested_rates["image"] == pytest.approx(lr * found.suggested_factor)
        rates.append(found.suggested_rates["image"])
    assert 1e-5 < rates[0] < 3e-3
    assert 1 / 10 < rates[1] / rates[0] < 10
    # The published setting is of a batch of thousands, and says nothing of 16.
    assert found.preset is not None
    assert found.preset.startswith("datacomp-b32 (scratch")


def test_rates_that_are_far_too_high_end_it(small_dataset: Path) -> None:
    config = small_run(small_dataset, batch_size=16)
    found = find_rate(replace(config, optim=replace(config.optim, lr=1e2)), updates=60)
    assert len(found.losses) < 60
    assert re.search(
        r"at [\d.]+ times the recipe's rates the loss or its gradient overflowed", found.finding
    )
    with pytest.raises(RunError, match=r"only \d+ of the first updates.*Lower optim.lr"):
        find_rate(replace(config, optim=replace(config.optim, lr=1e5)), updates=60)


def test_as_a_command(small_dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "rate", "frozen-lite0-minilm", "--data", str(small_dataset)]
    arguments += ["--batch-size", "16", "--updates", "40"]
    assert main([*arguments, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert len(tree["losses"]) == len(tree["factors"]) <= 40
    assert set(tree["suggested_rates"]) <= {"heads", "temperature"}
    assert main(arguments) == 0
    assert "optim.lr" in capsys.readouterr().out
    assert main([*arguments[:-1], "5"]) == 2
    assert "updates = 5: expected at least 30" in capsys.readouterr().err
    assert main(["bench", "rate"]) == 2
    assert "usage: pennyclip bench rate RECIPE --data DATASET [--sec" in capsys.readouterr().err


def test_presets_scale_by_their_optimizers_rule() -> None:
    flip, eva = PRESETS["flip"], PRESETS["eva02-clip-b16"]
    assert flip.scaled(256 * 64) == pytest.approx(4e-6 * 64)  # 4e-6 per 256 pairs
    assert eva.scaled(eva.batch // 4) == pytest.approx(1e-4)
    assert eva.scaled(eva.batch // FAR - 1) is None


def test_the_nearest_preset_has_the_same_start_and_optimizer() -> None:
    config = load_recipe("scratch-vit-tiny")
    large = replace(config, batch_size=32_768)
    stage = config.stages[0]
    assert nearest(large, stage) == ("clipa-b16", PRESETS["clipa-b16"])
    assert nearest(replace(large, optim=Optim(name="lamb")), stage) is None
    image = replace(config.model.image, name="vit_huge_patch14_224")
    same_tower = replace(large, model=replace(config.model, image=image))
    assert nearest(same_tower, stage) == ("clipav2-h14", PRESETS["clipav2-h14"])
    frozen = load_recipe("frozen-lite0-minilm")
    assert beginning(frozen, frozen.stages[0]) == "frozen"
    assert beginning(frozen, Stage(epochs=1.0)) == "pretrained"
    assert nearest(replace(frozen, optim=Optim(name="lion")), frozen.stages[0]) is not None


def test_a_stage_that_is_not_there_is_refused(small_dataset: Path) -> None:
    with pytest.raises(RequestError, match="stage 3: the recipe has stages 1 to 1"):
        find_rate(small_run(small_dataset, batch_size=16), stage=3)


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    for line, preset in zip(lines, PRESETS.values(), strict=True):
        assert re.search(r"\(.+, arXiv \d{4}\.\d{5}; [\w-]+/[\w-]+, .+\)$", line)
        assert (f" in {preset.precision};" in line) == (preset.precision is not None)


def test_presets_fit_models_that_exist() -> None:
    for preset in PRESETS.values():
        assert preset.optimizer in OPTIMIZERS
        assert preset.precision in (None, *get_args(Precision))
        for pattern in preset.fits:
            assert timm.list_models(pattern), pattern
