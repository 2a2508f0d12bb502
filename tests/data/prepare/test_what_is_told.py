"""What `prepare` says: in its summary, when a disk is full, when it is stopped."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_sources import run, write_table

import pennyclip.data.prepare
from pennyclip.base.errors import RequestError, RunError
from pennyclip.cli import main
from pennyclip.commands.filter.rules import Rules
from pennyclip.commands.filter.subset import filter_dataset
from pennyclip.data import shards
from pennyclip.data.index import Dataset

pytestmark = pytest.mark.usefixtures("in_process")


def test_few_rows_to_measure_on_are_told_with_what_they_can_tell(tmp_path: Path) -> None:
    """The standard error of 50 % over 6 rows is 20 points, over 100 rows 5."""
    summary = run(write_table(tmp_path / "in", 60), out=tmp_path / "out", val_share=0.1)
    text = str(summary)
    assert "warning   val has 6 rows: a recall of 50 % on them is uncertain by 20 points" in text
    assert "warning   dev has 2 rows" in text
    assert "train has" not in text
    lines = [line for line in text.splitlines() if "warning" in line]
    assert len(lines) == 2
    enough = replace(summary, splits={"train": 9, "val": 100, "dev": 100})
    assert "warning" not in str(enough)
    assert "warning   nothing is held out" in str(replace(summary, splits={"train": 4}))


def test_an_entry_names_its_picture(tmp_path: Path) -> None:
    """Its origin is a line of a table; where the file is gone, its name in the source is left."""
    run(write_table(tmp_path / "in", 4), out=tmp_path / "out")
    dataset = Dataset(tmp_path / "out")
    (entry,) = dataset.keys(np.array([2]))
    assert entry["origin"] == "captions.jsonl:3"
    file = tmp_path / "in" / entry["source_key"]
    assert dataset.picture(entry) == str(file)
    file.unlink()
    assert dataset.picture(entry) == entry["source_key"]


def test_a_filter_that_an_append_has_left_behind_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(write_table(tmp_path / "a", 20), out=out)
    filter_dataset(out, "wordy", rules=Rules(min_words=2))
    assert run(tmp_path / "a/captions.jsonl", out=out).stale_filters == []
    table = write_table(tmp_path / "b", 12, (60, 50))
    summary = run(table, out=out, append=True)
    assert summary.stale_filters == ["wordy"]
    assert "made before the last append, without its rows: wordy" in str(summary)
    with pytest.raises(RequestError, match=r"'wordy' already.*different: dataset"):
        filter_dataset(out, "wordy", rules=Rules(min_words=2))


def test_a_full_disk_names_the_file_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: shards.TarWriter, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards.TarWriter, "_write", full)
    message = r"No space left on device: '.*out/shards/000000\.tar'\. What is finished is kept"
    with pytest.raises(RunError, match=message):
        run(write_table(tmp_path / "in", 2), out=tmp_path / "out")
    assert not list((tmp_path / "out/shards").iterdir())


def test_ctrl_c_says_that_it_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pennyclip.data.prepare, "make_shards", stopped)
    table = write_table(tmp_path / "in", 2)
    assert main(["prepare", str(table), "--out", str(tmp_path / "out")]) == 130
    assert "What is finished is kept: run it again to go on." in capsys.readouterr().err
