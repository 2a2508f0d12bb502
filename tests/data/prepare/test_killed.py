"""`prepare` under kill -9 at random moments: the bytes in the end are those of an undisturbed run.

Minutes, so `full`. A few chosen moments are in test_prepare.py and test_append.py.
"""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_sources import contents, run, write_table

from pennyclip.data.index import Dataset

KILLS = 20

PREPARE = """
import sys
from pennyclip.data.prepare import prepare
prepare(
    [sys.argv[1]], sys.argv[2], append=sys.argv[3] == "append", engine=sys.argv[4],
    shard_size=20, workers=2, raw=64, dev_share=0.1, quiet=True,
)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "engine"), [("new", "local"), ("append", "local"), ("new", "ray")]
)
def test_killed_at_20_random_moments(tmp_path: Path, kind: str, engine: str) -> None:
    options = {"shard_size": 20, "raw": 64, "dev_share": 0.1}
    first = write_table(tmp_path / "first", 40)
    second = write_table(tmp_path / "second", 240, (640, 480))
    start = tmp_path / "start"
    if kind == "append":
        run(first, out=start, **options)

    def begin(out: Path) -> Path:
        shutil.rmtree(out, ignore_errors=True)
        if kind == "append":
            shutil.copytree(start, out)
        return out

    def command(out: Path, engine: str = engine) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-c", PREPARE, str(second), str(out), kind, engine]
        )

    whole, began = begin(tmp_path / "whole"), time.monotonic()
    assert command(whole).wait() == 0
    seconds = time.monotonic() - began
    expected = contents(whole)
    if engine == "ray":
        assert command(begin(tmp_path / "local"), "local").wait() == 0
        assert contents(tmp_path / "local") == expected

    chance, out, kills, finished = random.Random(0), begin(tmp_path / "out"), 0, 0
    while kills < KILLS:
        process = command(out)
        try:
            process.wait(chance.uniform(0.1, 1) * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            if kind == "append":
                dataset = Dataset(out)  # at every moment a whole one
                assert len(dataset) in (40, 280)
                assert dataset.captions(39) == ["number 39"]
        else:
            assert process.returncode == 0
            assert contents(out) == expected
            finished += 1
            begin(out)
    assert command(out).wait() == 0
    assert contents(out) == expected
    print(f"{kills} kills, {finished} finished between them")
