"""The lines that count how far `prepare` has come."""

import pytest

from pennyclip.base import progress
from pennyclip.base.progress import Counter


def test_the_rate_leaves_out_what_was_done_before_and_the_start_of_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Counter("prepare", 1000) as counter:
        counter.skip(500)  # by an earlier process
        now = 60.0  # until the processes have started
        counter.add(16, ", 3 refused")
        now = 71.0
        counter.add(220, ", 4 refused")
        now = 72.0
        counter.add(264)
    assert capsys.readouterr().err.splitlines() == [
        "prepare 516/1,000 (52%), 3 refused",
        "prepare 736/1,000 (74%), 20 a second, 4 refused, 13 s left",
        "prepare 1,000/1,000 (100%), 40 a second",
    ]
