"""What a loader needs grows neither with the epochs nor with the rows."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("loader_memory.py")
EPOCHS = 20


def run(*arguments: object) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def own_bytes(dataset: Path, rows: int, folder: Path) -> list[int]:
    copy = folder / str(rows)
    shutil.copytree(dataset, copy)
    run("enlarge", copy, rows)
    found = json.loads(run(copy, rows, EPOCHS))
    shutil.rmtree(copy)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
@pytest.mark.parametrize(
    "rows", [1_000_000, pytest.param(10_000_000, marks=pytest.mark.full)], ids="{:,}".format
)
def test_memory_is_flat_over_epochs_and_independent_of_rows(
    rows: int, small_dataset: Path, tmp_path: Path
) -> None:
    few, many = (own_bytes(small_dataset, count, tmp_path) for count in (128, rows))
    for found in few, many:
        assert len(found) == EPOCHS
        assert max(found[2:]) <= 1.05 * found[1], found
    assert many[-1] <= 1.05 * few[-1], (few, many)
