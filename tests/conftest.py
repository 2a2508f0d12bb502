"""What several tests need: the data sets that lie beside the repository, and a small one."""

import json
import os
from pathlib import Path

import pytest

from pennyclip.prepare import prepare

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `../shared`. Where it is absent the test is skipped; in CI, absence fails."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        reason = f"no data beside the repository: {folder.name}/ is absent"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 pictures of examples/clipart, prepared: about 100 to train on, some dev, some val."""
    lines = (ROOT / "examples/clipart/captions.jsonl").read_text(encoding="utf-8").splitlines()
    source = tmp_path_factory.mktemp("source") / "captions.jsonl"
    pairs = [json.loads(line) for line in lines[::11]]
    for pair in pairs:
        pair["image"] = str(ROOT / "examples/clipart" / pair["image"])
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    out = tmp_path_factory.mktemp("small") / "dataset"
    prepare([str(source)], out, dev_share=0.1, workers=1)
    return out
