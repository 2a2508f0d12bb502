"""--append: rows keep their numbers and splits, and nothing that interrupts it does damage."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_sources import contents, picture, rejects, run, write_table

from pennyclip.base.errors import RequestError, RunError
from pennyclip.data.index import Dataset

pytestmark = pytest.mark.usefixtures("in_process")


def table(folder: Path, seeds: range, **more: object) -> Path:
    """Pictures and captions that follow from their seeds; further columns for the first row."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for place, seed in enumerate(seeds):
        picture(seed).save(folder / f"{seed}.png")
        row = {"image": f"{seed}.png", "captions": [f"number {seed}"]}
        lines.append(json.dumps(row | (more if place == 0 else {})))
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder / "captions.jsonl"


def everything(dataset: Dataset) -> list[tuple[bytes, list[str], int]]:
    return [
        (dataset.image_bytes(row), dataset.captions(row), int(dataset.rows["group"][row]))
        for row in range(len(dataset))
    ]


def splits(dataset: Dataset) -> dict[str, list[int]]:
    return {name: dataset.subset(name).tolist() for name in dataset.subsets()}


def test_old_rows_keep_numbers_and_splits_and_new_ones_find_their_likes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(table(tmp_path / "a", range(20)), out=out, shard_size=8, val_share=0.1, dev_share=0.1)
    before = Dataset(out)
    old, old_splits, old_print = everything(before), splits(before), before.fingerprint
    seen, held = old_splits["train"][0], old_splits["val"][0]
    # The first new row says what a train row says, the second shows what a val row shows.
    new = table(tmp_path / "b", range(100, 120), captions=[f"Number  {seen}"])
    shutil.copy(tmp_path / "a" / f"{held}.png", tmp_path / "b" / "101.png")
    (tmp_path / "b" / "119.png").write_bytes(b"")
    options = {"shard_size": 8, "val_share": 0.1, "dev_share": 0.1, "append": True}
    summary = run(new, out=out, **options)
    after = Dataset(out)
    assert (summary.inputs, summary.kept, summary.shards, len(after)) == (40, 39, 6, 39)
    assert everything(after)[:20] == old
    assert after.fingerprint != old_print
    found = splits(after)
    for name, rows in old_splits.items():
        assert [row for row in found[name] if row < 20] == rows
    assert sorted(row for rows in found.values() for row in rows) == sorted({*range(39)} - {21})
    assert after.rows["group"][[20, 21]].tolist() == [seen, held]
    assert 20 in found["train"]
    assert [len(found[name]) - len(old_splits[name]) for name in ("val", "dev")] == [1, 1]
    assert summary.crossing == 1
    crossed = json.loads((out / "crossing.jsonl").read_text())
    assert (crossed["row"], crossed["key"], crossed["split"]) == (21, "101.png", "train")
    assert crossed["repeats"]["key"] == f"{held}.png"
    assert (crossed["repeats"]["row"], crossed["repeats"]["split"]) == (held, "val")
    assert [reject["source"] for reject in rejects(out)] == [1]
    assert [one["rows"] for one in summary.sources] == [[0, 20], [20, 39]]
    keys = [entry["key"] for entry in after.keys(np.arange(18, 22))]
    assert keys == [f"{i:09d}" for i in (18, 19, 20, 21)]
    assert (before.image_bytes(3), len(before)) == (old[3][0], 20)  # one that is open reads on


def test_the_same_append_again_is_a_no_op_and_others_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second = table(tmp_path / "a", range(6)), table(tmp_path / "b", range(6, 9))
    with pytest.raises(RequestError, match="no finished dataset, so nothing can be appended"):
        run(second, out=out, append=True)
    run(first, out=out)
    assert not run(second, out=out, append=True).already_done
    whole = contents(out)
    assert run(second, out=out, append=True).already_done
    assert run(first, out=out).already_done  # a script runs as a whole again
    assert run(first, out=out, append=True).already_done
    assert contents(out) == whole
    other = {"side": 64, "near_bits": 0, "raw": 32}
    told = r"side was 256 and is now 64.*first time: --side 256 --near-bits 6 without --raw\. "
    with pytest.raises(RequestError, match=told):
        run(table(tmp_path / "c", range(2)), out=out, append=True, **other)
    with pytest.raises(RequestError, match="source 1's path"):
        run(second, out=out)
    assert contents(out) == whole
    (tmp_path / "b" / "8.png").write_bytes((tmp_path / "b" / "7.png").read_bytes())
    extra = table(tmp_path / "extra", range(20, 22))
    for sources in ((second,), (extra, first)):  # changed since, and as it was
        with pytest.raises(RequestError, match="already, and what is in it would be there twice"):
            run(*sources, out=out, append=True)
    with pytest.raises(RequestError, match="is given twice"):
        run(extra, extra, out=tmp_path / "twice")
    assert contents(out) == whole
    third = run(table(tmp_path / "c", range(9, 12)), out=out, append=True)
    assert [one["rows"] for one in third.sources] == [[0, 6], [6, 9], [9, 12]]


def test_what_was_added_is_told_by_split_and_links_go_through_other_rows(tmp_path: Path) -> None:
    out, seeds = tmp_path / "out", range(20)
    first = run(table(tmp_path / "a", seeds), out=out, val_share=0.1, dev_share=0.1)
    assert first.added == {}
    before = splits(Dataset(out))
    # Three new pictures of one caption; one is a picture of train, one of dev.
    new = table(tmp_path / "b", range(100, 111))
    for name, split in (("100", "train"), ("101", "dev")):
        shutil.copy(tmp_path / "a" / f"{before[split][0]}.png", tmp_path / "b" / f"{name}.png")
    rows = [json.loads(line) for line in new.read_text().splitlines()]
    new.write_text("\n".join(json.dumps(r | {"captions": ["a cat"]}) for r in rows[:3]) + "\n")
    with new.open("a") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows[3:])
    for _ in range(2):  # made, and already there
        summary = run(new, out=out, val_share=0.1, dev_share=0.1, append=True)
        assert (summary.kept, summary.crossing) == (31, 3)
        after = splits(Dataset(out))
        added = {name: len(after[name]) - len(before[name]) for name in ("dev", "train", "val")}
        assert summary.added == {**added, "left out": 3}
        assert sum(summary.added.values()) == 11
        text = str(summary)
        assert f"added     dev {added['dev']}, train {added['train']}, val" in text
        assert "3 rows left out: another split has their picture or caption, or is linked" in text
        assert "begun before this append cannot be resumed" in text
    third = run(table(tmp_path / "c", range(200, 203)), out=out, val_share=0.1, dev_share=0.1,
                append=True)  # fmt: skip
    assert third.added == {"dev": 0, "train": 3, "val": 0, "left out": 0}
    assert run(tmp_path / "a/captions.jsonl", out=out, val_share=0.1, dev_share=0.1).added == {}


def test_rows_left_out_before_stay_listed_whatever_they_are_called(tmp_path: Path) -> None:
    """A file's name may hold what Python takes for the end of a line."""
    out, folder = tmp_path / "out", tmp_path / "a"
    rows = [{"image": f"{i}.png", "captions": [f"number {i}"], "split": "val"} for i in range(3)]
    rows += [{"image": f"twin\u2028{i}.png", "captions": ["again"]} for i in range(2)]
    rows.append({"image": "9.png", "captions": ["number 9"]})
    folder.mkdir()
    for row, seed in zip(rows, (0, 1, 2, 0, 1, 9), strict=True):
        picture(seed).save(folder / str(row["image"]))
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run(folder, out=out).crossing == 2
    listed = (out / "crossing.jsonl").read_bytes()
    assert run(table(tmp_path / "b", range(20, 24)), out=out, append=True).crossing == 2
    assert (out / "crossing.jsonl").read_bytes() == listed


def test_an_append_of_nothing_but_damage_leaves_the_dataset_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(write_table(tmp_path / "a", 5), out=out)
    whole = contents(out)
    bad = table(tmp_path / "b", range(3))
    for file in (tmp_path / "b").glob("*.png"):
        file.write_bytes(b"not a picture")
    with pytest.raises(RunError, match="3 of 3 inputs were refused"):
        run(bad, out=out, append=True)
    assert contents(out) == whole


APPEND = """
import sys
from pennyclip.data.prepare import prepare
prepare([sys.argv[1]], sys.argv[2], append=True, shard_size=5, workers=2, quiet=True)
"""


def test_an_append_killed_at_any_moment_does_no_damage_and_goes_on(tmp_path: Path) -> None:
    first = write_table(tmp_path / "a", 20)
    second = write_table(tmp_path / "b", 60, (500, 400))
    out, whole = tmp_path / "out", tmp_path / "whole"
    run(first, out=out, shard_size=5)
    shutil.copytree(out, whole)
    rows = everything(Dataset(out))
    named = splits(Dataset(out))
    run(second, out=whole, shard_size=5, append=True)
    for tars in (4, 6, 16):  # killed a little after so many are there; 16 are all
        process = subprocess.Popen([sys.executable, "-c", APPEND, str(second), str(out)])
        limit = time.monotonic() + 600
        while len(list(out.glob("shards/*.tar"))) < tars and process.poll() is None:
            assert time.monotonic() < limit
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if len(Dataset(out)) == 20:
            assert everything(Dataset(out)) == rows
            assert splits(Dataset(out)) == named
        if (out / "index" / "append.json").is_file():
            with pytest.raises(RequestError, match=r"an --append of .*b/captions.* interrupted"):
                run(table(tmp_path / "c", range(3)), out=out, shard_size=5, append=True)
    run(second, out=out, shard_size=5, append=True)
    assert contents(out) == contents(whole)


def test_before_dataset_json_the_dataset_is_the_old_one(tmp_path: Path) -> None:
    """Everything of the append is written but the last file."""
    out = tmp_path / "out"
    run(write_table(tmp_path / "a", 20), out=out, dev_share=0.1)
    manifest = (out / "dataset.json").read_bytes()
    rows, named = everything(Dataset(out)), splits(Dataset(out))
    second = write_table(tmp_path / "b", 30, (60, 50))
    run(second, out=out, dev_share=0.1, append=True)
    finished = contents(out)
    (out / "dataset.json").write_bytes(manifest)
    half = Dataset(out)
    assert [one[:2] for one in everything(half)] == [one[:2] for one in rows]
    assert splits(half) == named
    assert half.caption_starts[-1] == 20
    run(second, out=out, dev_share=0.1, append=True)
    assert contents(out) == finished


def test_an_append_that_is_given_up_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(table(tmp_path / "a", range(6)), out=out, shard_size=3)
    shutil.copytree(out, tmp_path / "whole")
    manifest, request = (out / "dataset.json").read_bytes(), out / "index" / "request.json"
    asked = request.read_bytes()
    run(table(tmp_path / "b", range(6, 12)), out=out, shard_size=3, append=True)
    request.rename(out / "index" / "append.json")  # as if killed before dataset.json
    (out / "dataset.json").write_bytes(manifest)
    request.write_bytes(asked)
    other = table(tmp_path / "c", range(20, 26))
    with pytest.raises(RequestError, match=r"give it up by removing .*append\.json"):
        run(other, out=out, shard_size=3, append=True)
    (out / "index" / "append.json").unlink()
    for folder in (out, tmp_path / "whole"):
        run(other, out=folder, shard_size=3, append=True)
    assert contents(out) == contents(tmp_path / "whole")


def test_an_append_killed_after_its_last_file_is_done(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(table(tmp_path / "a", range(6)), out=out)
    asked = (out / "index" / "request.json").read_bytes()
    second = table(tmp_path / "b", range(6, 12))
    run(second, out=out, append=True)
    whole = contents(out)
    (out / "index" / "request.json").rename(out / "index" / "append.json")
    (out / "index" / "request.json").write_bytes(asked)
    third = table(tmp_path / "c", range(12, 15))
    assert run(second, out=out, append=True).already_done
    assert contents(out) == whole
    assert run(third, out=out, append=True).kept == 15


def test_a_root_on_another_disk_is_appended_to_in_turn(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "disk2" / "mine"
    run(table(tmp_path / "a", range(12)), out=out, roots=[other], shard_size=5, raw=32)
    run(
        table(tmp_path / "b", range(12, 20)),
        out=out,
        roots=[other],
        shard_size=5,
        raw=32,
        append=True,
    )
    assert sorted(os.listdir(out / "shards")) == ["000000.tar", "000002.tar", "000004.tar"]
    assert sorted(os.listdir(other / "shards")) == ["000001.tar", "000003.tar"]
    assert sorted(os.listdir(other / "raw")) == ["000001.npy", "000003.npy"]
    dataset = Dataset(out)
    assert [dataset.captions(row)[0] for row in range(20)] == [f"number {i}" for i in range(20)]
    assert dataset.pixels(19, 32).shape == (32, 32, 3)
    moved = tmp_path / "disk3"
    other.rename(moved)
    again = {"out": out, "shard_size": 5, "raw": 32}
    for more in ({}, {"append": True}):  # finished, and before anything is appended
        source = table(tmp_path / "c", range(20, 30)) if more else tmp_path / "a/captions.jsonl"
        with pytest.raises(RequestError, match=r"lacks 4 of its 10 shard files.*under 'roots'"):
            run(source, roots=[other], **again, **more)
        assert not other.exists()
    manifest = json.loads((out / "dataset.json").read_text())
    (out / "dataset.json").write_text(json.dumps(manifest | {"roots": [".", str(moved)]}))
    assert Dataset(out).captions(6) == ["number 6"]
    with pytest.raises(
        RequestError, match=r"roots was \['.*disk3'\] and is now \['.*disk2/mine'\]"
    ):
        run(source, roots=[other], append=True, **again)
    shutil.rmtree(other, ignore_errors=True)
    run(source, roots=[moved], append=True, **again)
    dataset = Dataset(out)
    assert [dataset.captions(row)[0] for row in range(30)] == [f"number {i}" for i in range(30)]
    assert sorted(os.listdir(moved / "shards")) == [f"00000{n}.tar" for n in (1, 3, 5)]
    whole = (moved / "raw" / "000003.npy").read_bytes()
    (moved / "raw" / "000003.npy").write_bytes(whole[:-1])
    with pytest.raises(RequestError, match=r"lacks 1 of its 14 .*000003\.npy is of another size"):
        Dataset(out)
