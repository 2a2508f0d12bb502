import csv
import inspect
import io
import json
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from small_sources import contents, picture, rejects, run, write_table

from pennyclip.base.errors import RequestError, RunError
from pennyclip.commands.prepare import Prepare
from pennyclip.data.images import decode_jpeg
from pennyclip.data.index import Dataset
from pennyclip.data.prepare import prepare
from pennyclip.data.prepare.work import PATIENCE, _systematic


@pytest.mark.parametrize(("delimiter", "suffix"), [(",", "csv"), ("\t", "tsv")])
def test_case_1_table_with_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delimiter: str, suffix: str
) -> None:
    (tmp_path / "pics").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with (tmp_path / f"table.{suffix}").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["filepath", "title"])
        for i in range(8):
            picture(i).save(tmp_path / "pics" / f"{i}.png")
            writer.writerow([f"pics/{i}.png", "a dog, running" if i == 5 else f"number {i}"])
    monkeypatch.chdir(tmp_path / "elsewhere")
    summary = run(Path(f"../table.{suffix}"), out=Path("out"))
    assert (summary.inputs, summary.kept, summary.captions) == (8, 8, 8)
    assert summary.splits == {"train": 8}
    dataset = Dataset("out")
    assert dataset.captions(5) == ["a dog, running"]
    difference = decode_jpeg(dataset.image_bytes(5)).astype(int) - np.asarray(picture(5))
    assert np.abs(difference).mean() < 6
    with pytest.raises(RequestError, match=r"Looked for 'legend'.*'filepath', 'title'"):
        run(Path(f"../table.{suffix}"), out=Path("other"), caption_key="legend")


def test_case_3_bad_inputs_cost_themselves(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 20)
    (tmp_path / "in" / "3.jpg").write_bytes(b"")
    (tmp_path / "in" / "7.jpg").write_text("<!DOCTYPE html><p>404")
    whole = (tmp_path / "in" / "11.jpg").read_bytes()
    (tmp_path / "in" / "11.jpg").write_bytes(whole[: len(whole) // 2])
    summary = run(table, out=tmp_path / "out", shard_size=6)
    assert (summary.kept, summary.shards) == (17, 4)
    assert summary.rejected == {"empty file": 1, "not a picture": 1, "damaged": 1}
    found = rejects(tmp_path / "out")
    assert [reject["key"] for reject in found] == ["3.jpg", "7.jpg", "11.jpg"]
    assert [reject["origin"] for reject in found] == [f"captions.jsonl:{n}" for n in (4, 8, 12)]
    assert "DOCTYPE" in str(found[1]["reason"])
    dataset = Dataset(tmp_path / "out")
    assert [dataset.captions(row)[0] for row in range(17)] == [
        f"number {i}" for i in range(20) if i not in (3, 7, 11)
    ]
    assert "17 of 20 inputs kept" in str(summary)
    assert f"refused   3, listed in {tmp_path}/out/rejects.jsonl" in str(summary)


def test_every_awkward_file_in_one_run(shared: Path, tmp_path: Path) -> None:
    manifest = shared / "data" / "nasty" / "manifest.csv"
    with manifest.open(encoding="utf-8", newline="") as file:
        verdicts = {row["file"]: row["should_decode"] for row in csv.DictReader(file)}
    out = tmp_path / "out"
    summary = run(manifest, out=out, image_key="file", caption_key="kind")
    dataset = Dataset(out)
    kept = {entry["source_key"]: entry for entry in dataset.keys(np.arange(len(dataset)))}
    refused = {str(reject["key"]): reject["reason"] for reject in rejects(out)}
    assert set(kept) | set(refused) == set(verdicts)
    assert len(kept) + len(refused) == summary.inputs == len(verdicts) == 40
    for name, verdict in verdicts.items():
        assert verdict in ("yes" if name in kept else "no", "optional"), name
    upright = kept["exif_rot6_landscape.jpg"]
    assert (upright["width"], upright["height"]) == (1800, 1200)
    assert (upright["stored_width"], upright["stored_height"]) == (384, 256)
    for row in range(len(dataset)):
        pixels = decode_jpeg(dataset.image_bytes(row))
        assert min(pixels.shape[:2]) <= 256


def test_shards_are_plain_tars_and_rows_point_into_them(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 7, (400, 300))
    run(table, out=tmp_path / "out", shard_size=3)
    dataset = Dataset(tmp_path / "out")
    row = 0
    for number, names in enumerate([range(3), range(3, 6), range(6, 7)]):
        with tarfile.open(tmp_path / "out" / "shards" / f"{number:06d}.tar") as tar:
            members = tar.getmembers()
            keys = [f"{i:09d}.{suffix}" for i in names for suffix in ("jpg", "txt")]
            assert [member.name for member in members] == keys
            for member in members:
                assert (member.mtime, member.uid, member.gid, member.pax_headers) == (0, 0, 0, {})
            for image, text in zip(members[::2], members[1::2], strict=True):
                assert tar.extractfile(image).read() == dataset.image_bytes(row)  # type: ignore[union-attr]
                assert tar.extractfile(text).read().decode() == f"number {row}"  # type: ignore[union-attr]
                assert decode_jpeg(dataset.image_bytes(row)).shape == (256, 341, 3)
                row += 1
    assert row == len(dataset) == 7


def test_a_dataset_s_shards_are_a_source_again(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 5)
    first = run(table, out=tmp_path / "first", shard_size=2)
    second = run(tmp_path / "first" / "shards", out=tmp_path / "second")
    assert (second.kept, second.captions) == (first.kept, first.captions)
    a, b = Dataset(tmp_path / "first"), Dataset(tmp_path / "second")
    for row in range(5):
        assert a.image_bytes(row) == b.image_bytes(row)
        assert a.captions(row) == b.captions(row)


def test_a_small_jpeg_keeps_its_data_and_loses_its_position(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x010F] = "SecretMaker"
    exif.get_ifd(0x8825)[2] = (52.0, 31.0, 12.0)
    picture(1, (200, 150)).save(tmp_path / "small.jpg", exif=exif)
    picture(2, (900, 600)).save(tmp_path / "large.jpg", exif=exif)
    for name in ("small", "large"):
        (tmp_path / f"{name}.txt").write_text(name)
    run(tmp_path, out=tmp_path.parent / f"{tmp_path.name}-out")
    dataset = Dataset(tmp_path.parent / f"{tmp_path.name}-out")
    entries = {
        entry["source_key"]: (row, entry) for row, entry in enumerate(dataset.keys(np.arange(2)))
    }
    row, entry = entries["small.jpg"]
    original = (tmp_path / "small.jpg").read_bytes()
    assert not entry["reencoded"]
    assert (decode_jpeg(dataset.image_bytes(row)) == decode_jpeg(original)).all()
    assert entries["large.jpg"][1]["reencoded"]
    for row in range(2):
        jpeg = dataset.image_bytes(row)
        assert b"Secret" not in jpeg
        assert not Image.open(io.BytesIO(jpeg)).getexif()


def test_several_sources_captions_splits_and_duplicates(tmp_path: Path) -> None:
    """Groups: same pixels (0, 3), same words (1, 4), the source's own (2, 5)."""
    folder = tmp_path / "a"
    folder.mkdir()
    for i, seed in enumerate([0, 1, 2, 0, 4, 5, 6, 7]):
        picture(seed).save(folder / f"{i}.png")
    rows = [
        {"captions": ["nan", "two words"], "split": "val"},
        {"captions": ["A  Dog, running"], "split": "val"},
        {"captions": ["two"], "split": "train", "group": "g"},
        {"captions": ["three"], "split": "train"},
        {"captions": ["other", "a dog, Running "], "split": "train"},
        {"captions": ["five"], "split": "val", "group": "g"},
        {"captions": ["None", " "], "split": "train"},
        {"captions": [" ", ""], "split": "train"},
    ]
    lines = [json.dumps({"image": f"{i}.png", **row}) for i, row in enumerate(rows)]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    table = write_table(tmp_path / "b", 2)
    (tmp_path / "b" / "0.jpg").unlink()
    summary = run(folder, table, out=tmp_path / "out", shard_size=3)
    dataset = Dataset(tmp_path / "out")
    assert summary.kept == len(dataset) == 8
    assert summary.rejected == {"no caption": 1, "no such file": 1}
    assert dataset.captions(0) == ["nan", "two words"]
    assert dataset.captions(6) == ["None"]
    assert dataset.rows["captions"].tolist() == [2, 1, 1, 1, 2, 1, 1, 1]
    assert dataset.rows["group"].tolist() == [0, 1, 2, 0, 1, 2, 6, 7]
    assert dataset.subset("val").tolist() == [0, 1, 5]
    assert dataset.subset("train").tolist() == [6, 7]
    assert (summary.crossing, summary.groups, summary.largest_group) == (3, 5, 2)
    last = dataset.keys(np.array([7]))[0]
    assert (last["source"], last["source_key"]) == (1, "1.jpg")


def test_duplicates_never_cross_carved_splits(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    lines = []
    for i in range(120):
        picture(i // 2).save(folder / f"{i}.png")
        lines.append(json.dumps({"image": f"{i}.png", "caption": f"caption {i}"}))
    (folder / "captions.jsonl").write_text("\n".join(lines))
    summary = run(folder, out=tmp_path / "out", val_share=0.1, dev_share=0.1)
    assert summary.splits == {"dev": 10, "train": 98, "val": 12}
    dataset = Dataset(tmp_path / "out")
    groups = [set(dataset.rows["group"][dataset.subset(n)].tolist()) for n in summary.splits]
    assert len(groups[0] | groups[1] | groups[2]) == sum(map(len, groups)) == 60


def test_the_workers_don_t_change_a_byte(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 25, (300, 280))
    (tmp_path / "in" / "9.jpg").write_bytes(b"")
    for workers in (1, 3):
        run(table, out=tmp_path / f"out{workers}", workers=workers, shard_size=4)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out3")


def test_the_same_request_again_is_a_no_op_and_another_is_refused(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 6)
    out = tmp_path / "out"
    first = run(table, out=out)
    before = contents(out)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = run(table, out=out, workers=1)
    assert not first.already_done
    assert again.already_done
    assert "already finished" in str(again)
    assert (again.fingerprint, again.kept) == (first.fingerprint, 6)
    assert contents(out) == before
    assert times == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(RequestError, match="quality was 90 and is now 80"):
        run(table, out=out, quality=80)
    other = write_table(tmp_path / "in2", 6)
    with pytest.raises(RequestError, match=r"source 1's path was .* and is now"):
        run(other, out=out)
    with table.open("a") as file:
        file.write(json.dumps({"image": "0.jpg", "captions": ["one more"]}) + "\n")
    with pytest.raises(
        RequestError,
        match=r"different request: .*in/captions\.jsonl has changed: a table, or its files\.",
    ):
        run(table, out=out)
    assert contents(out) == before


KILLED = """
import sys
from pennyclip.data.prepare import prepare
prepare([sys.argv[1]], sys.argv[2], shard_size=25, workers=2, quiet=True)
"""


def test_killed_at_any_moment_and_run_again_gives_the_same_bytes(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 200, (640, 480))
    run(table, out=tmp_path / "whole", shard_size=25)
    whole = contents(tmp_path / "whole")
    out = tmp_path / "out"
    finished = []
    for tars in (0, 2, 6):  # killed a little after so many of the 8 shards' tars are written
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(table), str(out)])
        limit = time.monotonic() + 600
        while len(list(out.glob("shards/*.tar"))) < tars or not (out / "index").is_dir():
            assert time.monotonic() < limit
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        finished.append(len(list(out.glob("index/*.json"))))
    assert finished[0] < finished[-1]
    assert not (out / "dataset.json").is_file()
    summary = run(table, out=out, shard_size=25)
    assert not summary.already_done
    assert contents(out) == whole


def test_a_shard_that_lost_its_tar_is_made_again(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 9)
    run(table, out=tmp_path / "out", shard_size=3)
    whole = contents(tmp_path / "out")
    for name in ("dataset.json", "index/rows.npy", "shards/000001.tar"):
        (tmp_path / "out" / name).unlink()
    run(table, out=tmp_path / "out", shard_size=3)
    assert contents(tmp_path / "out") == whole


def test_systematic_failure_stops_with_the_first_cause(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 30)
    for path in (tmp_path / "in").glob("*.jpg"):
        path.rename(path.with_suffix(".moved"))
    out = tmp_path / "out"
    with pytest.raises(
        RunError, match=r"30 of 30 inputs .*captions\.jsonl:1, 0\.jpg: no such file"
    ):
        run(table, out=out)
    assert contents(out) == {}
    for path in (tmp_path / "in").glob("*.moved"):
        path.rename(path.with_suffix(".jpg"))
    assert run(table, out=out).kept == 30  # the cause corrected, the same command goes through


def test_a_long_run_stops_after_the_first_shards_if_they_are_bad(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "good.png")
    names = [*(f"{i}.png" for i in range(PATIENCE)), "good.png"]
    rows = [f"{name},number {i}\n" for i, name in enumerate(names)]
    (tmp_path / "table.csv").write_text("image,caption\n" + "".join(rows))
    with pytest.raises(RunError, match=r"1,000 of 1,000 inputs .*csv:2, 0\.png: no such file"):
        run(tmp_path / "table.csv", out=tmp_path / "out", shard_size=250, workers=1)


@pytest.mark.parametrize(
    ("inputs", "refused", "stops"),
    [
        (PATIENCE - 1, PATIENCE - 2, False),
        (PATIENCE - 1, PATIENCE - 1, True),
        (PATIENCE, PATIENCE // 2, False),
        (PATIENCE, PATIENCE // 2 + 1, True),
    ],
)
def test_how_much_may_be_refused(inputs: int, refused: int, stops: bool) -> None:
    reject = {"origin": "table.csv:2", "key": "0.png", "reason": "no such file"}
    shards = [{"inputs": 10, "rejects": []}, {"inputs": inputs - 10, "rejects": [reject] * refused}]
    assert (_systematic(shards) is not None) == stops


def test_the_command_and_the_function_have_the_same_defaults() -> None:
    own = {name: one.default for name, one in inspect.signature(prepare).parameters.items()}
    for field in fields(Prepare):
        if field.name not in ("sources", "out", "json"):
            assert field.default == own[field.name], field.name


def test_folders_that_are_not_for_it_are_refused(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 3)
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("dear")
    with pytest.raises(RequestError, match=r"holds something else \(chapter\.tex\)"):
        run(table, out=other)
    assert contents(other) == {"chapter.tex": b"dear"}
    with pytest.raises(RequestError, match="is a file"):
        run(table, out=table)
    table.unlink()
    for i in range(3):
        (tmp_path / "in" / f"{i}.txt").write_text("x")
    with pytest.raises(RequestError, match="inside its own source"):
        run(tmp_path / "in", out=tmp_path / "in" / "out")
    for options in ({"quality": 0}, {"val_share": 1.5}, {"workers": 0}, {"shard_size": 0}):
        with pytest.raises(RequestError, match=f"{next(iter(options))} = "):
            run(tmp_path / "in", out=tmp_path / "new", **options)


def test_openstax_pairs(shared: Path, tmp_path: Path) -> None:
    """A slice of the real data, with the split it brings."""
    folder = shared / "data" / "openstax-pairs"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "images").symlink_to(folder / "images")
    lines = (folder / "captions.jsonl").read_text("utf-8").splitlines()[:200]
    (tmp_path / "in" / "captions.jsonl").write_text("\n".join(lines), "utf-8")
    summary = run(tmp_path / "in", out=tmp_path / "out", shard_size=100)
    records = [json.loads(line) for line in lines]
    assert summary.kept == 200
    assert summary.captions == sum(len(record["captions"]) for record in records)
    assert summary.splits["val"] == sum(record["split"] == "val" for record in records)
    dataset = Dataset(tmp_path / "out")
    assert [dataset.captions(row) for row in range(200)] == [r["captions"] for r in records]


def test_plain_lines_of_progress_go_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(tmp_path / "in", 5)
    run(table, out=tmp_path / "out", quiet=False)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "prepare 5/5 (100%)" in printed.err


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    table = write_table(tmp_path / "in", 4)
    script = tmp_path / "script.py"
    script.write_text(KILLED + "print('ran')\n")
    ran = subprocess.run(
        [sys.executable, str(script), str(table), str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert (ran.stdout, ran.returncode) == ("ran\n", 0), ran.stderr
    assert len(Dataset(tmp_path / "out")) == 4
    table_file = pq.read_table(tmp_path / "out" / "index" / "000000.parquet")
    assert table_file["key"].to_pylist() == [f"{i:09d}" for i in range(4)]


def test_a_picture_too_wide_for_jpeg_costs_itself(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, size in (("wide", (70_000, 100)), ("good", (40, 40))):
        Image.new("RGB", size, (200, 10, 10)).save(source / f"{name}.png")
        (source / f"{name}.txt").write_text(name)
    summary = prepare([str(source)], tmp_path / "out", workers=1, quiet=True)
    assert (summary.kept, summary.inputs) == (1, 2)
