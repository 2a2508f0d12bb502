"""Tables and tars as nobody would write them: each input gives a pair or the reason why not."""

import csv
import io
import json
import os
import random
import tarfile
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pennyclip.base.errors import RequestError
from pennyclip.data.images import ImageError
from pennyclip.data.shards import _read
from pennyclip.data.sources import Pair, Reject, Source, open_source
from pennyclip.data.sources.files import MAX_TEXT
from pennyclip.data.sources.pairs import caption_lines, clean_captions, json_captions, load_json

SETTINGS = settings(
    max_examples=60,
    deadline=None,  # the machine may be busy
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # each example writes its own file
)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
CAPTIONS = st.lists(st.one_of(TEXT, st.sampled_from(["None", "nan", "NA", " ", "", '"', "a,b\tc"])))


def read(source: Source) -> list[Pair | Reject]:
    found = list(source.read(0, len(source)))
    assert all(isinstance(item, Pair | Reject) for item in found)
    return found


def read_or_refuse(file: Path) -> list[Pair | Reject]:
    """What is read of a file; nothing, if it is refused by its name."""
    try:
        return read(open_source(file))
    except RequestError as error:
        if str(file) not in str(error):
            raise AssertionError("the message names no file") from error
        return []


def check(found: list[Pair | Reject], captions: list[str]) -> None:
    """One input a caption: cleaned, or refused for want of words."""
    assert len(found) == len(captions)
    for i, (item, caption) in enumerate(zip(found, captions, strict=True)):
        cleaned = clean_captions([caption])
        if isinstance(item, Pair):
            assert (item.key, item.captions) == (f"{i} é,;.jpg", cleaned)
        else:
            assert cleaned == []
            assert item.reason.startswith("no caption")


@SETTINGS
@given(
    captions=CAPTIONS.filter(len),
    delimiter=st.sampled_from(",\t;|"),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    suffix=st.sampled_from(["csv", "tsv"]),
)
def test_any_delimiter_quote_line_break_and_mark(
    tmp_path: Path, captions: list[str], delimiter: str, end: str, mark: bytes, suffix: str
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerow(["image", "caption", "more"])
    writer.writerows([f"{i} é,;.jpg", caption, '"'] for i, caption in enumerate(captions))
    file = tmp_path / f"t.{suffix}"
    file.write_bytes(mark + text.getvalue().encode())
    check(read(open_source(file)), captions)


@SETTINGS
@given(captions=CAPTIONS.filter(len), ascii=st.booleans(), end=st.sampled_from(["\n", "\r\n"]))
def test_any_json(tmp_path: Path, captions: list[str], ascii: bool, end: str) -> None:
    rows = [{"image": f"{i} é,;.jpg", "captions": [c, None]} for i, c in enumerate(captions)]
    (tmp_path / "t.json").write_text(json.dumps(rows, ensure_ascii=ascii), "utf-8")
    lines = end.join(json.dumps(row, ensure_ascii=ascii) for row in rows)
    (tmp_path / "t.jsonl").write_bytes(lines.encode())
    for name in ("t.json", "t.jsonl"):
        check(read(open_source(tmp_path / name)), captions)


@SETTINGS
@given(captions=CAPTIONS.filter(len), suffix=st.sampled_from(["parquet", "arrow"]))
def test_any_column(tmp_path: Path, captions: list[str], suffix: str) -> None:
    names = [f"{i} é,;.jpg" for i in range(len(captions))]
    table = pa.table({"image": names, "caption": pa.array(captions, pa.large_string())})
    file = tmp_path / f"t.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, file)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
            out.write_table(table)
    check(read(open_source(file)), captions)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "cp1252", "shift-jis"])
def test_other_encodings_are_named_and_not_guessed(tmp_path: Path, encoding: str) -> None:
    text = "image,caption\na.jpg," + ("犬" if encoding == "shift-jis" else "café") + "\n"
    (tmp_path / "t.csv").write_bytes(text.encode(encoding))
    with pytest.raises(RequestError, match=r"t\.csv, line \d+: not UTF-8 \(byte 0x"):
        open_source(tmp_path / "t.csv")


VALID = {
    "csv": 'image,caption\na.jpg,"one ""two"", three"\nb.jpg,four\n',
    "tsv": "image\tcaption\na.jpg\tone\n",
    "jsonl": '{"image": "a.jpg", "captions": ["one", "two"], "split": "train"}\n' * 3,
    "json": '[{"image": "a.jpg", "caption": "one"}, {"image": "b.jpg", "caption": "two"}]',
}


@SETTINGS
@given(data=st.data(), suffix=st.sampled_from(sorted(VALID)))
def test_damaged_tables_are_refused_or_read(
    tmp_path: Path, data: st.DataObject, suffix: str
) -> None:
    content = bytearray(VALID[suffix].encode())
    for _ in range(data.draw(st.integers(0, 6))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    file = tmp_path / f"t.{suffix}"
    file.write_bytes(content)
    read_or_refuse(file)


def test_json_nested_to_the_bottom(tmp_path: Path) -> None:
    deep = "[" * 200_000
    (tmp_path / "t.jsonl").write_text('{"image": "a.jpg", "caption": "fine"}\n' + deep + "\n")
    fine, refused = read(open_source(tmp_path / "t.jsonl"))
    assert isinstance(fine, Pair)
    assert isinstance(refused, Reject)
    assert "not valid JSON" in refused.reason
    (tmp_path / "t.json").write_text(deep)
    with pytest.raises(RequestError, match="not valid JSON"):
        open_source(tmp_path / "t.json")


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_damaged_columns_are_refused_or_read(tmp_path: Path, suffix: str) -> None:
    images = pa.array([b"picture %d" % i for i in range(300)])
    table = pa.table({"image": images, "caption": [f"number {i}" for i in range(300)]})
    file = tmp_path / f"t.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, file, row_group_size=100)
    else:
        new = pa.ipc.new_stream if suffix == "arrow" else pa.ipc.new_file
        with pa.OSFile(str(file), "wb") as sink, new(sink, table.schema) as out:
            out.write_table(table, max_chunksize=100)
    whole, chance = file.read_bytes(), random.Random(0)
    read_some = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(whole))] = chance.randrange(256)
        file.unlink()  # the old one may still be mapped
        file.write_bytes(damaged[: chance.choice([len(whole), chance.randrange(len(whole))])])
        read_some += len(read_or_refuse(file))
    assert read_some > 0


# --- tars

NAMES = st.one_of(
    st.sampled_from(
        [
            *("1.jpg", "1.txt", "1.json", "1.seg.png", "a.b.jpg", "a.b.txt", "../x.jpg"),
            *("../x.txt", "/abs.png", "/abs.txt", ".jpg", ".txt", "d/.jpg", "é.jpg", "é.txt"),
            "x" * 150 + ".jpg",
        ]
    ),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1),
)
KINDS = st.sampled_from(
    [tarfile.REGTYPE] * 6 + [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE]
)


@SETTINGS
@given(
    members=st.lists(st.tuples(NAMES, st.binary(max_size=600), KINDS), min_size=1, max_size=12),
    form=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_any_tar(tmp_path: Path, members: list[tuple[str, bytes, bytes]], form: int) -> None:
    """Every picture comes with bytes that a regular member of its name has, and with captions of
    one called like it but for the suffix; or is refused."""
    tar = tmp_path / "x.tar"
    with tarfile.open(tar, "w", format=form) as archive:
        for name, data, kind in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "../../../etc/passwd"
            info.size = len(data) if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(data))
    contents: dict[str, list[bytes]] = {}
    with tarfile.open(tar) as archive:
        for info in archive:
            if info.isfile():
                data = archive.extractfile(info).read()  # type: ignore[union-attr]
                contents.setdefault(info.name, []).append(data)
    for item in read(open_source(tar)):
        if isinstance(item, Pair):
            assert item.image in contents[item.key]
            stem = item.key[: -len(Path(item.key).suffix)]
            assert item.captions in captions_beside(contents, stem)


def captions_beside(contents: dict[str, list[bytes]], stem: str) -> list[list[str]]:
    """Those of every member called STEM.txt or STEM.json, the suffix in any case."""
    found = []
    named = [(name, data) for name in contents if name.startswith(stem) for data in contents[name]]
    for name, data in named:
        suffix = name.removeprefix(stem).lower()
        with suppress(ValueError):  # not UTF-8, not JSON, no caption in it
            if suffix == ".txt":
                found.append(clean_captions(caption_lines(data)))
            elif suffix == ".json":
                found.append(clean_captions(json_captions(load_json(data), "")))
    return found


def claim(tar: Path, name: bytes, size: int) -> None:
    """Let the header of one member say that it is `size` bytes long."""
    data = bytearray(tar.read_bytes())
    at = data.index(name + b"\0")
    if size < 8**11:
        data[at + 124 : at + 136] = b"%011o\0" % size
    else:
        data[at + 124 : at + 136] = b"\x80" + size.to_bytes(11, "big")  # GNU's base 256
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    tar.write_bytes(data)


@pytest.mark.parametrize("size", [50_000, MAX_TEXT + 1, 1 << 32, 1 << 60, (1 << 80) + 5])
@pytest.mark.parametrize("name", [b"2.jpg", b"2.txt"])
def test_a_huge_declared_size_costs_no_memory(tmp_path: Path, size: int, name: bytes) -> None:
    tar = tmp_path / "x.tar"
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as archive:
        for member in ("1.jpg", "1.txt", "2.jpg", "2.txt", "3.jpg", "3.txt"):
            info = tarfile.TarInfo(member)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
    claim(tar, name, size)
    tracemalloc.start()
    found = read(open_source(tar))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32e6
    assert isinstance(found[0], Pair)
    assert found[0].key == "1.jpg"
    assert any(isinstance(item, Reject) for item in found[1:])


def test_files_that_wait_or_never_end_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "b.txt").write_text("fine")
    (tmp_path / "b.jpg").write_bytes(b"x")
    a, b = read(open_source(tmp_path))
    assert isinstance(a, Reject)
    assert a.reason == "bad caption: a.txt: not a file"
    assert isinstance(b, Pair)
    for path in (tmp_path / "a.txt", Path("/dev/zero"), tmp_path):
        with pytest.raises(ImageError, match="unreadable: not a file"):
            _read(Pair("k", path, ["c"], None, None, "o"))
