"""The main job as scripts/quickstart does it, on all of examples/clipart: minutes, so `full`."""

import json
from pathlib import Path

import pytest

from pennyclip.cli import main

ROOT = Path(__file__).resolve().parents[1]


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.full
def test_the_quickstart_finds_its_held_out_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = str(tmp_path / "dataset"), str(tmp_path / "run")
    made = answer(
        ["prepare", str(ROOT / "examples/clipart"), "--out", data, "--dev-share", "0.1"], capsys
    )
    assert (made["kept"], made["splits"]["val"]) == (1600, 400)
    assert answer(["train", "frozen-lite0-minilm", "--data", data, "--out", run], capsys)["best"]
    metrics = answer(["eval", "retrieval", run, "--data", data], capsys)["metrics"]
    assert metrics["image_to_text/R@10"] >= 0.45
    assert metrics["text_to_image/R@10"] >= 0.45
    assert Path(answer(["report", run], capsys)["report"]).stat().st_size > 100_000
    hits = answer(["search", run, "a red fruit", "--data", data], capsys)["hits"]
    assert sum("fruit" in " ".join(hit["captions"]).lower() for hit in hits) >= 3
