"""Two real processes (gloo) make the update of one: gradients, decisions and ways to fail."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from rank_scenarios import CASES, COUNT, FIRST_ROW, PAIRS, PART, STEPS, worker
from torch import Tensor

from pennyclip.cli import main
from update_batches import tiny_clip, weights


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank and name, what came of cases and scenarios. One start of processes for all."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, args=(str(folder),), nprocs=COUNT)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(COUNT)]


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if torch.is_tensor(one):
        return torch.equal(one, other)
    return one == other or (one != one and other != other)


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of any gradient, relative to the largest value of that gradient."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - v).abs().max() / v.abs().max()) for n, v in expected.items())


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_one_process(name: str, found: list[dict[str, Any]]) -> None:
    """Gradients of towers, temperature and bias; metrics and embeddings of the whole batch."""
    one, other = (by_rank[name] for by_rank in found)
    assert same(one, other)
    expected = CASES[name].run(None)
    assert error(one["gradients"], expected["gradients"]) < 1e-5
    assert expected["gradients"]["logit_scale"] != 0
    assert ("logit_bias" in expected["gradients"]) == (CASES[name].loss == "sigmoid")
    record, whole = one["record"], expected["record"]
    assert record.keys() == whole.keys()
    assert record["candidates"] == PAIRS
    assert record["grad_norms"] == pytest.approx(whole["grad_norms"], rel=1e-4)
    for key in ("loss", "accuracy", "image_cosine", "text_cosine", "logit_scale", "grad_norm"):
        assert record[key] == pytest.approx(whole[key], rel=1e-5), key
    for key, value in expected["features"].items():
        torch.testing.assert_close(one["features"][key], value, rtol=0, atol=1e-5)


def test_no_case_is_idle() -> None:
    """Without the masks, groups or dropout of a case, its gradients would be others."""
    plain = CASES["whole parts"].run(None)["gradients"]
    for name in ("masked", "dropout", "dropout, in micro-batches", "groups, infonce"):
        assert error(CASES[name].run(None)["gradients"], plain) > 0.05
    again = replace(CASES["dropout"], micro_batch=2).run(None)["gradients"]
    assert error(again, CASES["dropout"].run(None)["gradients"]) > 0.05


def test_an_overflow_on_one_rank_is_skipped_on_both(found: list[dict[str, Any]]) -> None:
    one, other = (by_rank["overflowing"] for by_rank in found)
    assert same(one, other)  # loss scale, counters, norms and weights, all of them
    records = one["records"]
    assert [r["skipped"] is None for r in records] == [what == "made" for what in STEPS]
    assert [r["loss_scale"] for r in records] == [64, 64, 32, 32, 64, 32, 16, 8, 8]
    assert [r["overflows"] for r in records] == [0, 1, 1, 1, 2, 3, 4, 4, 4]
    assert one["scaler"] == {"scale": 16.0, "overflows": 4, "since": 0}
    everybody = list(range(FIRST_ROW, FIRST_ROW + PAIRS))
    for step in (1, 4, 5):
        skipped = records[step]["skipped"]
        assert skipped["tensor"] == "the gradient of visual.head.proj.weight"
        assert skipped["rows"] == everybody
    assert records[6]["skipped"]["tensor"] == "the output of visual.trunk.patch_embed"
    assert records[6]["skipped"]["rows"] == [FIRST_ROW + 3]
    assert all(math.isfinite(r["grad_norm"]) and r["grad_norm"] > 1 for r in records[:1])
    before, after = weights(tiny_clip()), one["weights"]
    assert all(torch.isfinite(value).all() for value in after.values())
    assert not torch.equal(after["visual.head.proj.weight"], before["visual.head.proj.weight"])


def test_the_temperature_keeps_its_bound_on_both(found: list[dict[str, Any]]) -> None:
    one, other = (by_rank["overflowing"]["temperatures"] for by_rank in found)
    assert one == other
    assert one[0] == pytest.approx(math.log(100), abs=1e-7)
    assert one[1] == one[0] != one[2]  # nothing moves in a skipped update


def test_the_rows_and_the_tensor_are_named_on_both(found: list[dict[str, Any]]) -> None:
    one, other = (by_rank["not_finite"] for by_rank in found)
    assert one == other
    everybody = list(range(FIRST_ROW, FIRST_ROW + PAIRS))
    assert one == {
        "text": {"tensor": "the text embedding", "rows": everybody[PART:]},
        "white": {"tensor": "the output of visual.trunk.patch_embed", "rows": [everybody[13]]},
        "white on both": {
            "tensor": "the output of visual.trunk.patch_embed",
            "rows": [everybody[0], everybody[9]],
        },
        "loss": {"tensor": "the loss", "rows": everybody},
        "gradient": {
            "tensor": "the gradient of text.transformer.resblocks.1.ln_2.bias",
            "rows": everybody,
        },
        "untouched": True,
    }


@pytest.mark.parametrize(
    ("where", "asked", "size"),
    [
        ("the first pass", PART, 2),
        ("the second pass", 4, 2),
        ("every pass but the last", PART, 1),
        ("the loss", PART, PART // 2),
        ("the backward pass", PART, PART // 2),
    ],
)
def test_memory_that_runs_out_on_one_rank_halves_on_both(
    where: str, asked: int, size: int, found: list[dict[str, Any]]
) -> None:
    """And the update is the one that a single process would have made."""
    one, other = (by_rank["running_out"][where] for by_rank in found)
    assert same(one, other)
    assert one["record"]["micro_batch"] == size
    assert (
        f"with {asked} pairs in the towers at a time: from here on {size}"
        in (one["record"]["shortage"])
    )
    assert error(one["gradients"], CASES["whole parts"].run(None)["gradients"]) < 1e-5


def test_what_one_rank_cannot_do_none_does(found: list[dict[str, Any]]) -> None:
    """Each says the cause, or who has it; the model is as it was."""
    one, other = (by_rank["failing"] for by_rank in found)
    elsewhere = "rank 1 failed, and no rank goes on without the others"
    for name, first, second in (
        ("cut on both", "RequestError: 28 of", "get no gradient, in the text tower"),
        ("cut on one", elsewhere, "get no gradient, in the text tower"),
        ("another error", elsewhere, "ZeroDivisionError: by zero"),
        ("not even one", "OutOfMemory: memory ran out with 1 of", "not even one pair fits"),
        ("the step", "in the optimizer's step", "OutOfMemory: memory ran out in the optimizer's"),
        ("batch norm", "each of 2 ranks has a part of it", "RequestError: 34 BatchNorm layers"),
    ):
        assert first in one[name], name
        assert second in other[name], name
    assert one["cut on both"] == other["cut on both"]


def test_stochastic_rounding_is_the_same_on_both(found: list[dict[str, Any]]) -> None:
    one, other = (by_rank["rounding"] for by_rank in found)
    assert same(one, other)
    weight = one["text.transformer.resblocks.0.mlp.c_fc.weight"]
    assert torch.equal(weight, weight.bfloat16().float())


def test_sums_are_exact_and_in_place(found: list[dict[str, Any]]) -> None:
    one, other = (by_rank["summing"] for by_rank in found)
    half = len(one) // 2
    assert same(one[half:], other[half:])
    for mine, yours, total in zip(one[:half], other[:half], one[half:], strict=True):
        assert torch.equal(mine + yours, total)


@pytest.mark.parametrize("arguments", [["scratch-vit-tiny", "--out"], ["--resume"]])
def test_training_in_one_of_several_processes_is_refused(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is looked at: there is neither a dataset nor a run here."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", *arguments, str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "training runs in one process, and this is one of 2 (WORLD_SIZE = 2" in told
    assert "without a launcher" in told
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["train", *arguments, str(tmp_path / "run")]) == 2
    assert "WORLD_SIZE" not in capsys.readouterr().err
