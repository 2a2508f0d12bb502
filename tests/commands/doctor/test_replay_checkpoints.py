"""Which checkpoints stay for a replay, and which of them a run goes back to."""

from pathlib import Path
from typing import Any

import pytest
import torch

from faulty_runs import request
from pennyclip.config.keys import ClipText, Config, ImageTower, Model
from pennyclip.data.loader import Batch
from pennyclip.loss import Features
from pennyclip.model.clip import CLIP
from pennyclip.training.folder import RunFolder
from pennyclip.training.saver import REACH, Saver, leading_to
from pennyclip.training.telemetry.metrics import Metrics
from pennyclip.training.watch.health import Health
from pennyclip.training.watch.watch import Watch
from pennyclip.weights.checkpoint import Checkpoint, Scores, checkpoints, save


@pytest.fixture(scope="module")
def model() -> CLIP:
    image = ImageTower(name="test_vit", image_size=32)
    return CLIP(Model(embed_dim=8, image=image, text=ClipText(width=16, heads=1, layers=1)))


def write(run: Path, model: CLIP, step: int, score: float | None = None, **more: Any) -> list[int]:
    save(run, step, Scores(score), model, None, {}, None, dataset="", keep=1, **more)
    return [c.step for c in checkpoints(run)]


def test_the_newest_before_a_batch_stays(tmp_path: Path, model: CLIP) -> None:
    """Beside the newest one and the best one; batch 20 is not older than the checkpoint 20."""
    assert write(tmp_path, model, 10, 0.5) == [10]
    assert write(tmp_path, model, 20) == [10, 20]
    assert write(tmp_path, model, 30, before=[21]) == [10, 20, 30]
    assert write(tmp_path, model, 40, before=[21, 40]) == [10, 20, 30, 40]
    assert write(tmp_path, model, 50, before=[21, 50]) == [10, 20, 40, 50]
    assert write(tmp_path, model, 60, before=[5]) == [10, 60]


def test_the_first_trouble_and_the_latest_are_remembered() -> None:
    health = Health()
    assert health.worth_a_look == []
    for since in (31, 57, 90):
        health.trouble(since)
    assert Health.load(health.state()).troubles == [31, 90]
    health.collapse.since, health.course.since = 120, 118
    assert health.worth_a_look == [31, 90, 118]
    health.course.since, health.not_finite = None, [121, 122]
    assert health.worth_a_look == [31, 90, 120]
    health.collapse.since = None
    assert health.worth_a_look == [31, 90, 121]


@pytest.mark.parametrize(
    ("scale", "held", "troubles"),
    [
        (None, 0.0, [7]),
        (1024.0, 1024.0, [7]),
        (2048.0, 1024.0, []),  # it had just grown
        (65536.0, 0.0, []),  # and here it had been too large from the start
    ],
)
def test_an_overflow_of_a_loss_scale_that_grew_is_no_trouble(
    tmp_path: Path, scale: float | None, held: float, troubles: list[int]
) -> None:
    """Three batches in a row without an update, 7 to 9."""
    watch = Watch(request(tmp_path, 90), 90, lambda *_, **__: None, Health(held=held).state())
    rows = torch.arange(4)
    batch = Batch(rows, rows, None, None, None, None, None)
    x = torch.eye(4)
    features = Features(x, x, x, x, 0, torch.tensor(1.0), None, rows)
    for step in (7, 8, 9):
        skipped = {"tensor": "the loss", "rows": [1], "loss_scale_after": 0.5 * (scale or 0)}
        record: dict[str, Any] = {"features": features, "grad_norms": {}, "skipped": skipped}
        record |= {"loss_scale": scale} if scale else {}
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        assert watch.judge(step, record, batch, torch.nn.Linear(1, 1), optimizer) is None
    assert set(watch.health.troubles) == set(troubles)
    assert set(watch.health.worth_a_look) == {7}


def saver(run: Path, config: Config, *steps: int, back: tuple[int, int] | None = None) -> Saver:
    """Of a run with some checkpoints, which once went `back` to one step at another."""
    for step in steps:
        folder = run / f"checkpoints/step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text(f'{{"step": {step}, "score": null}}')
    metrics = Metrics(run / "metrics.jsonl")
    metrics.log("start", 0)
    if back is not None:
        metrics.log("event", back[1], name="rolled back", message="", to=back[0])
    return Saver(config, RunFolder(run, None), None, metrics, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "back", "since", "chosen"),
    [
        ([40, 50], None, 57, 40),  # 50 may be too late already
        ([50], None, 57, 50),
        ([40, 47], None, 57, 47),
        ([60], None, 57, None),
        ([100, 9995], None, 9999, 9995),  # 100 was kept for a replay
        ([9999 - REACH, 9995], None, 9999, 9999 - REACH),
        ([100, 5000], None, 9999, 5000),
        ([40, 50, 60], (40, 60), 66, 40),  # what 50 had learnt was undone
        ([50, 60], (40, 60), 66, 60),
    ],
)
def test_a_run_goes_back_past_what_may_be_broken_and_no_further(
    tmp_path: Path, steps: list[int], back: tuple[int, int] | None, since: int, chosen: int | None
) -> None:
    found = saver(tmp_path, request(tmp_path, 90), *steps, back=back).before(since)
    assert (found and found.step) == chosen


def test_a_batch_before_a_rollback_has_the_checkpoints_that_it_undid() -> None:
    found = [Checkpoint(Path(str(step)), step, None) for step in (40, 50, 60)]
    assert [c.step for c in leading_to(57, found, [(40, 60)])] == [40, 50]
    assert [c.step for c in leading_to(60, found, [(40, 60)])] == [40, 50]
    assert [c.step for c in leading_to(61, found, [(40, 60)])] == [40, 60]
