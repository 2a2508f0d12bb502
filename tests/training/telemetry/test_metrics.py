"""metrics.jsonl: what is written comes back, and a killed run's file can be gone on with."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pennyclip.training.telemetry.metrics import Metrics, _line, read_metrics


def write(path: Path, *steps: int, resume_step: int | None = None) -> None:
    metrics = Metrics(path, resume_step)
    for step in steps:
        metrics.log("train", step, loss=1 / (step + 1))
    metrics.close()


def test_values_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.log("start", 0, request={"data": tmp_path / "d\udc80ta", "list": (1, 2)})
    metrics.log("train", 10, loss=np.float32(0.5), lr={"heads": 1e-3}, samples=torch.tensor(2560))
    metrics.log("event", 10, name="note", message="Größe\u2028“ok”\nnext")

    start, train, event = read_metrics(path)  # not closed yet: a record is out once logged
    metrics.close()
    assert start["request"] == {"data": str(tmp_path / "d\udc80ta"), "list": [1, 2]}
    assert (train["kind"], train["step"], train["loss"]) == ("train", 10, 0.5)
    assert train["lr"] == {"heads": 0.001}
    assert train["samples"] == 2560
    assert event["message"] == "Größe\u2028“ok”\nnext"
    assert start["time"] <= train["time"] <= event["time"]
    assert start["time"].endswith("+00:00")


def test_numbers_that_are_not_finite_stay_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.log("train", 1, loss=math.nan, norms=[math.inf, np.float32("-inf")], grad=torch.nan)
    metrics.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert (record["loss"], record["norms"], record["grad"]) == ("nan", ["inf", "-inf"], "nan")
    assert math.isnan(float(record["loss"]))


def test_resume_drops_what_lies_beyond_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 5, 10, 15, 20)
    before = path.read_bytes().splitlines(keepends=True)
    write(path, 15, resume_step=10)
    assert path.read_bytes().splitlines(keepends=True)[:3] == before[:3]
    assert [record["step"] for record in read_metrics(path)] == [0, 5, 10, 15]
    assert list(tmp_path.iterdir()) == [path]


def test_resume_keeps_what_happened_beyond_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 5, 10)
    metrics = Metrics(path)
    metrics.log("event", 10, name="temperature", message="drifts")
    metrics.log("event", 14, name="loss spike", message="up", rows=[3])
    metrics.log("eval", 15, metrics={})
    metrics.log("end", 15, reason="error")
    metrics.close()
    for _ in range(2):  # the second time, nothing changes
        write(path, resume_step=10)
        found = read_metrics(path)
        assert [(r["kind"], r["step"], r.get("abandoned", False)) for r in found] == [
            ("train", 5, False),
            ("train", 10, False),
            ("event", 10, False),
            ("event", 14, True),
            ("end", 15, True),
        ]
        assert found[3]["rows"] == [3]


def test_opening_without_a_step_only_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 5, 10)
    before, inode = path.read_bytes(), path.stat().st_ino
    write(path, 7)
    assert path.read_bytes().startswith(before)
    assert path.stat().st_ino == inode
    assert [record["step"] for record in read_metrics(path)] == [5, 10, 7]


@pytest.mark.parametrize("resume_step", [None, 10])
def test_a_cut_last_line_costs_that_line(tmp_path: Path, resume_step: int | None) -> None:
    whole = tmp_path / "whole.jsonl"
    write(whole, 5, 10)
    content = whole.read_bytes()
    first = content.index(b"\n") + 1
    for end in range(first, len(content)):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(content[:end])
        complete = end == len(content) - 1  # only the line break is missing
        assert [record["step"] for record in read_metrics(path)] == ([5, 10] if complete else [5])
        write(path, 12, resume_step=resume_step)
        expected = [5, 10, 12] if complete else [5, 12]
        assert [json.loads(line)["step"] for line in path.open()] == expected


def test_a_damaged_line_elsewhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 5)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0\0\0\n[1]\n" + whole)
    write(path, 10)
    records = read_metrics(path)
    assert [record["kind"] for record in records] == ["train", "event", "event", "train", "train"]
    assert [record["step"] for record in records] == [5, 5, 5, 5, 10]
    assert "line 2 " in records[1]["message"]
    assert "line 3 " in records[2]["message"]


@given(st.dictionaries(st.text(), st.floats() | st.integers() | st.text() | st.none()))
def test_any_fields_survive(fields: dict[str, object]) -> None:
    back = json.loads(_line({"kind": "event", "step": 1, "evidence": fields}))["evidence"]
    for key, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            assert back[key] == str(value)
        else:
            assert back[key] == value
