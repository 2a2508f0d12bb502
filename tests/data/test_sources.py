import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from pennyclip.base.errors import RequestError
from pennyclip.data.sources import Pair, Reject, Source, open_source

PIXEL = b"not decoded here"


def pairs(source: Source) -> list[Pair]:
    found = list(source.read(0, len(source)))
    assert all(isinstance(pair, Pair) for pair in found), found
    return found  # type: ignore[return-value]


def write_tar(path: Path, members: dict[str, bytes] | list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


# --- tables


@pytest.mark.parametrize(("delimiter", "suffix"), [(",", "csv"), ("\t", "tsv"), (";", "csv")])
def test_case_1_eight_rows_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delimiter: str, suffix: str
) -> None:
    rows = [["filepath", "title"]] + [[f"pics/{i}.jpg", f"picture {i}"] for i in range(8)]
    rows[3][1] = '"a dog, running"'
    table = tmp_path / f"table.{suffix}"
    table.write_text("\n".join(delimiter.join(row) for row in rows) + "\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = pairs(open_source(f"../table.{suffix}"))
    assert len(found) == 8
    assert found[2].captions == ["a dog, running"]
    assert found[2].image.resolve() == tmp_path / "pics" / "2.jpg"  # type: ignore[union-attr]
    assert found[2].origin == f"table.{suffix}:4"


def test_a_missing_column_names_the_header_and_the_delimiter(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("picture\tlegend\n1.jpg\ta, b\n")
    with pytest.raises(RequestError) as error:
        open_source(table)
    for part in ("'\\t' (tab)", "'picture', 'legend'", "--image-key"):
        assert part in str(error.value)
    with pytest.raises(RequestError, match=r"column for the caption.*--caption-key"):
        open_source(table, image_key="picture")
    with pytest.raises(RequestError, match="Looked for 'nope'"):
        open_source(table, image_key="nope", caption_key="legend")
    assert pairs(open_source(table, image_key="picture", caption_key="legend"))[0].captions == [
        "a, b"
    ]


def test_a_column_that_is_there_twice_is_not_guessed_at(tmp_path: Path) -> None:
    table = tmp_path / "x.csv"
    table.write_text("image,caption,caption\n0.jpg,one,two\n")
    with pytest.raises(RequestError, match=r"x\.csv: the header has 'caption' 2 times"):
        open_source(table)
    table.write_text("image,caption,other,other\n0.jpg,one,two,three\n")
    assert pairs(open_source(table))[0].captions == ["one"]


def test_captions_that_look_like_nothing_stay_words(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    words = ["None", "NA", "null", "nan", "7", "1e5", "TRUE"]
    table.write_text("image,caption\n" + "".join(f"{i}.jpg,{w}\n" for i, w in enumerate(words)))
    assert [pair.captions for pair in pairs(open_source(table))] == [[word] for word in words]
    lines = ['{"image": "a.jpg", "caption": "nan"}', '{"image": "b.jpg", "caption": 1.50}']
    lines += ['{"image": "c.jpg", "captions": [null, "None", NaN]}']
    lines += ['{"image": "d.jpg", "caption": null}']
    jsonl = tmp_path / "table.jsonl"
    jsonl.write_text("\n".join(lines[:2]))
    assert [pair.captions for pair in pairs(open_source(jsonl))] == [["nan"], ["1.50"]]
    jsonl.write_text(lines[2].replace("captions", "caption") + "\n" + lines[3])
    first, second = open_source(jsonl).read(0, 2)
    assert isinstance(first, Pair)
    assert first.captions == ["None", "NaN"]
    assert isinstance(second, Reject)
    assert second.reason.startswith("no caption")
    assert second.origin == "table.jsonl:2"


def test_quotes_line_breaks_nul_and_bom(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    text = (
        'filepath,title\r\na.jpg,"say ""hi"",\r\n  then\u2028go "\r\nb.jpg, kept\tas is \r\n'
        "c.jpg,a\0b\r\n"
    )
    table.write_bytes(b"\xef\xbb\xbf" + text.encode())
    a, b, c = pairs(open_source(table))
    assert a.captions == ['say "hi",   then go ']
    assert b.captions == [" kept\tas is "]
    assert c.captions == ["ab"]
    assert [pair.origin for pair in (a, b, c)] == ["table.csv:2", "table.csv:4", "table.csv:5"]


def test_tab_tables_without_quoting(tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    table.write_text('image\tcaption\na.jpg\t"Hello" he said\nb.jpg\t5" disk\nc.jpg\t"open\n')
    captions = [pair.captions[0] for pair in pairs(open_source(table))]
    assert captions == ['"Hello" he said', '5" disk', '"open']


def test_a_comma_table_with_broken_quotes_is_refused_by_line(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text('image,caption\na.jpg,fine\nb.jpg,"Hello" he said\n')
    with pytest.raises(RequestError, match=r"quotes don't add up .*line 3"):
        open_source(table)


def test_rows_of_the_wrong_length_cost_themselves(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("image,caption\na.jpg,one, two\n\nb.jpg\nc.jpg,fine\n,lost\nd.jpg,  \n")
    found = list(open_source(table).read(0, 99))
    assert [type(item) for item in found] == [Reject, Reject, Pair, Reject, Reject]
    assert [item.origin[-1] for item in found] == ["2", "4", "5", "6", "7"]
    assert "3 fields, and the header has 2" in found[0].reason  # type: ignore[union-attr]
    assert "no caption" in found[4].reason  # type: ignore[union-attr]


def test_rows_of_one_image_are_its_captions(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("image,caption\na.jpg,one\nb.jpg,two\na.jpg,three\na.jpg,one\n")
    a, b = pairs(open_source(table))
    assert a.captions == ["one", "three"]
    assert b.captions == ["two"]


def test_splits_and_groups(tmp_path: Path) -> None:
    jsonl = tmp_path / "t.jsonl"
    rows = [
        {"image": "a.jpg", "captions": ["x", "y"], "split": "Train", "group": 3},
        {"image": "b.jpg", "captions": ["z"], "split": "validation"},
        {"image": "c.jpg", "captions": ["z"], "split": ""},
    ]
    jsonl.write_text("\n".join(map(json.dumps, rows)))
    found = pairs(open_source(jsonl))
    assert [pair.split for pair in found] == ["train", "val", None]
    assert [pair.group for pair in found] == ["3", None, None]
    jsonl.write_text(json.dumps({**rows[0], "split": "restval"}))
    with pytest.raises(RequestError, match="line 1: split 'restval', expected one of train"):
        open_source(jsonl)


def test_lines_that_are_no_records(tmp_path: Path) -> None:
    jsonl = tmp_path / "t.jsonl"
    lines = [
        '{"image": "a.jpg", "caption": "fine"}',
        "{broken",
        "[1, 2]",
        '{"image": "b.jpg"}',
        '{"image": "c.jpg", "caption": {"raw": "x"}}',
        '{"image": "d.jpg", "caption": "half \\ud83d"}',
        '{"image": "https://example.org/e.jpg", "caption": "far"}',
    ]
    jsonl.write_text("\n".join(lines) + "\n")
    found = list(open_source(jsonl).read(0, 99))
    assert len(found) == 7
    assert isinstance(found[0], Pair)
    reasons = [item.reason for item in found[1:] if isinstance(item, Reject)]
    for reason, part in zip(
        reasons,
        ["not valid JSON", "not a JSON object", "no field", "neither", "surrogates", "address"],
        strict=True,
    ):
        assert part in reason


def test_a_table_that_is_not_utf_8_or_has_only_addresses(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_bytes("image,caption\na.jpg,café\n".encode("latin-1"))
    with pytest.raises(RequestError, match="line 2: not UTF-8"):
        open_source(table)
    table.write_text("url,caption\nhttps://example.org/a.jpg,far\n")
    with pytest.raises(RequestError, match="not downloaded"):
        open_source(table)


def test_openstax_layout_by_file_and_by_folder(shared: Path) -> None:
    folder = shared / "data" / "openstax-pairs"
    by_folder, by_file = open_source(folder), open_source(folder / "captions.jsonl")
    assert by_folder == by_file
    found = pairs(by_folder)
    assert len(found) == 3118
    assert sum(len(pair.captions) for pair in found) == 6462
    assert sum(pair.split == "val" for pair in found) == 316


# --- a folder with text files


def test_folder_with_text_files(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.v2.jpg", "a.PNG", "deep/er/c.webp", "deep/no_suffix", "deep/lonely.jpg"):
        (tmp_path / name).write_bytes(PIXEL)
    (tmp_path / "b.v2.txt").write_bytes(b"\xef\xbb\xbfone line\r\nanother\r\n\r\n")
    (tmp_path / "a.txt").write_text("None\n")
    (tmp_path / "deep/er/c.txt").write_text("  \n")
    (tmp_path / "deep/no_suffix.txt").write_bytes(b"caf\xe9")
    (tmp_path / "README.txt").write_text("about this folder")
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / ".hidden.jpg").write_bytes(PIXEL)
    source = open_source(tmp_path)
    assert source.kind == "folder"
    found = {item.key: item for item in source.read(0, len(source))}
    assert len(found) == len(source) == 6
    assert found["b.v2.jpg"].captions == ["one line", "another"]  # type: ignore[union-attr]
    assert found["a.PNG"].captions == ["None"]  # type: ignore[union-attr]
    for key, part in (
        ("deep/er/c.webp", "no caption: it has none"),
        ("deep/no_suffix", "bad caption: no_suffix.txt"),
        ("deep/lonely.jpg", "no caption: lonely.txt is not beside it"),
        ("README.txt", "no picture"),
    ):
        assert part in found[key].reason  # type: ignore[union-attr]
    same = open_source(tmp_path)
    assert same.fingerprint == source.fingerprint
    (tmp_path / "a.txt").write_text("changed\n")
    assert open_source(tmp_path).fingerprint != source.fingerprint


def test_a_folder_that_cannot_be_looked_into_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("open", "shut"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(PIXEL)
        (tmp_path / name / "1.txt").write_text("one")
    scan = os.scandir

    def guarded(path: str) -> object:
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", guarded)  # root may look into everything
    with pytest.raises(RequestError, match=r"/shut cannot be looked into: Permission denied\."):
        open_source(tmp_path)


def test_slices_read_what_the_whole_reads(tmp_path: Path) -> None:
    for i in range(7):
        (tmp_path / f"{i}.jpg").write_bytes(PIXEL)
        (tmp_path / f"{i}.txt").write_text(f"number {i}")
    source = open_source(tmp_path)
    parts = [list(source.read(start, start + 3)) for start in (0, 3, 6)]
    assert [len(part) for part in parts] == [3, 3, 1]
    assert [pair for part in parts for pair in part] == pairs(source)


# --- tars


def test_webdataset_tars(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "00000.tar",
        {
            "a/0001.jpg": b"one",
            "a/0001.txt": b"first\nsecond\n",
            "a/0001.json": b'{"caption": "other", "width": 3}',
            "a/0002.json": b'{"caption": "from json"}',
            "a/0002.png": b"two",
        },
    )
    write_tar(tmp_path / "00001.tar", {"0001.jpg": b"three", "0001.txt": "naïve".encode()})
    source = open_source(tmp_path)
    assert source.kind == "webdataset"
    one, two, three = pairs(source)
    assert (one.image, one.captions, one.key) == (b"one", ["first", "second"], "a/0001.jpg")
    assert (two.image, two.captions) == (b"two", ["from json"])
    assert (three.image, three.captions) == (b"three", ["naïve"])
    assert (one.origin, three.origin) == ("00000.tar", "00001.tar")
    assert pairs(open_source(tmp_path / "00001.tar")) == [three]
    by_key = open_source(tmp_path / "00000.tar", caption_key="caption")
    assert [pair.captions for pair in pairs(by_key)] == [["other"], ["from json"]]


def test_tar_names_with_dots_masks_and_repeated_names(tmp_path: Path) -> None:
    tar = tmp_path / "x.tar"
    write_tar(
        tar,
        [
            ("shot.left.jpg", b"left"),
            ("shot.left.txt", b"on the left"),
            ("shot.right.jpg", b"right"),
            ("shot.right.txt", b"on the right"),
            ("7.jpg", b"seven"),
            ("7.seg.png", b"mask"),
            ("7.txt", b"lucky"),
            ("7.jpg", b"seven again"),
            ("7.txt", b"lucky again"),
            ("8.jpg", b"no words"),
            ("9.txt", b"no picture"),
        ],
    )
    found = list(open_source(tar).read(0, 99))
    assert [(pair.image, pair.captions[0]) for pair in found if isinstance(pair, Pair)] == [
        (b"left", "on the left"),
        (b"right", "on the right"),
        (b"seven", "lucky"),
        (b"seven again", "lucky again"),
    ]
    assert [item.reason.partition(":")[0] for item in found if isinstance(item, Reject)] == [
        "no caption",
        "no picture",
    ]


def test_a_tar_s_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    write_tar(tmp_path / "A.TAR", {"1.jpg": b"one", "1.txt": b"first"})
    assert pairs(open_source(tmp_path)) == pairs(open_source(tmp_path / "A.TAR"))


def test_a_tar_that_breaks_off_keeps_what_stands_before(tmp_path: Path) -> None:
    tar = tmp_path / "x.tar"
    write_tar(tar, {"1.jpg": bytes(600), "1.txt": b"one", "2.jpg": bytes(9000), "2.txt": b"two"})
    tar.write_bytes(tar.read_bytes()[:4500])
    found = list(open_source(tar).read(0, 99))
    assert isinstance(found[0], Pair)
    assert found[-1].reason.startswith("damaged tar")  # type: ignore[union-attr]
    tar.write_bytes(gzip.compress(bytes(600)))
    (packed,) = open_source(tar).read(0, 9)
    assert packed.reason.startswith("compressed tar: unpack it with gunzip")  # type: ignore[union-attr]


def test_tar_members_that_are_links_or_in_capitals(tmp_path: Path) -> None:
    tar = tmp_path / "x.tar"
    with tarfile.open(tar, "w") as archive:
        for name, target in (("1.jpg", b""), ("1.txt", b""), ("2.jpg", b"1.jpg"), ("2.txt", b"")):
            member = tarfile.TarInfo(name)
            if target:
                member.type, member.linkname = tarfile.LNKTYPE, target.decode()
            member.size = 0 if target else 3
            archive.addfile(member, io.BytesIO(b"one"))
        for name in ("3.JPG", "3.TXT"):
            member = tarfile.TarInfo(name)
            member.size = 5
            archive.addfile(member, io.BytesIO(b"three"))
    one, two, three = open_source(tar).read(0, 9)
    assert isinstance(one, Pair)
    assert isinstance(two, Reject)
    assert (two.key, two.reason) == ("2.jpg", "a link: no picture")
    assert isinstance(three, Pair)
    assert (three.key, three.image, three.captions) == ("3.JPG", b"three", ["three"])


# --- what is no source


def test_what_is_no_source_says_what_was_seen(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="doesn't exist"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.jpg").write_bytes(PIXEL)
    with pytest.raises(RequestError, match=r"(?s)a folder holding 1 x \.jpg.*captions\.jsonl"):
        open_source(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"\x7fELF")
    with pytest.raises(RequestError, match=r"a file ending in '\.bin', starting with b'.x7fELF'"):
        open_source(tmp_path / "x.bin")
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(RequestError, match="cannot be read as parquet"):
        open_source(tmp_path / "x.parquet")
    write_tar(tmp_path / "y.tar", {"1.jpg": b"", "1.txt": b"one"})
    with pytest.raises(
        RequestError,
        match=r"--image-key file means nothing to .*\(webdataset\): it is for datasets, t",
    ):
        open_source(tmp_path / "y.tar", image_key="file")


def test_a_folder_of_tars_and_pictures_is_not_guessed_at(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    (tmp_path / "cat.txt").write_text("a cat")
    with tarfile.open(tmp_path / "backup.tar", "w"):
        pass
    with pytest.raises(RequestError, match="holds both webdataset tars"):
        open_source(tmp_path)


def test_an_empty_caption_of_a_picture_that_has_others_is_counted(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text('image,caption\na.jpg,\na.jpg,one\na.jpg,two\nb.jpg," "\n')
    found = list(open_source(table).read(0, 9))
    assert [item.origin for item in found] == ["t.csv:2", "t.csv:3", "t.csv:5"]
    assert isinstance(found[1], Pair)
    assert found[1].captions == ["one", "two"]
    assert all("no caption" in item.reason for item in found if isinstance(item, Reject))
