"""What several tests need: the data sets that lie beside the repository."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `../shared`. Where it is absent the test is skipped; in CI, absence fails."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        reason = f"no data beside the repository: {folder.name}/ is absent"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder
