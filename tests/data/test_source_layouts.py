"""Sources other than folders, text tables and plain tars: what others' tools leave on disk."""

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from pennyclip.base.errors import RequestError
from pennyclip.data.sources import Pair, Reject, Source, open_source
from pennyclip.data.sources.columns import BATCH

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])  # Hugging Face's Image feature


def pairs(source: Source) -> list[Pair]:
    found = list(source.read(0, len(source)))
    assert all(isinstance(pair, Pair) for pair in found), found
    return found  # type: ignore[return-value]


def write_json(file: Path, tree: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(tree))


# --- COCO


def coco(folder: Path, part: str, names: list[str]) -> Path:
    """Two captions an image, ids that are not in order."""
    images = [{"id": 900 - i, "file_name": name, "width": 8} for i, name in enumerate(names)]
    annotations = [
        {"id": n, "image_id": image["id"], "caption": f"{part} {image['file_name']} {n}"}
        for n in range(2)
        for image in reversed(images)
    ]
    (folder / part).mkdir(parents=True)
    for name in names:
        (folder / part / name).write_bytes(name.encode())
    file = folder / "annotations" / f"captions_{part}.json"
    write_json(file, {"info": {}, "images": images, "annotations": annotations})
    return file


def test_coco_s_folder_and_one_of_its_files(tmp_path: Path) -> None:
    coco(tmp_path, "train2017", ["000000000009.jpg", "000000000025.jpg"])
    val = coco(tmp_path, "val2017", ["000000000139.jpg"])
    write_json(tmp_path / "annotations/instances_val2017.json", {"images": [], "annotations": []})
    source = open_source(tmp_path)
    assert source.kind == "coco"
    a, b, c = pairs(source)
    assert (a.key, b.key, c.key) == ("000000000009.jpg", "000000000025.jpg", "000000000139.jpg")
    assert a.captions == ["train2017 000000000009.jpg 0", "train2017 000000000009.jpg 1"]
    assert [pair.split for pair in (a, b, c)] == ["train", "train", "val"]
    assert isinstance(c.image, Path)
    assert c.image.read_bytes() == b"000000000139.jpg"
    assert c.origin == "captions_val2017.json: image 900"
    assert pairs(open_source(val)) == [c]
    before = source.fingerprint
    (tmp_path / "train2017/000000000009.jpg").write_bytes(b"another picture")
    assert open_source(tmp_path).fingerprint != before


def test_coco_s_stray_annotations_and_bare_images_cost_themselves(tmp_path: Path) -> None:
    file = coco(tmp_path, "train2014", ["a.jpg", "b.jpg"])
    tree = json.loads(file.read_text())
    tree["annotations"] = [
        {"image_id": 900, "caption": "fine"},
        {"image_id": 17, "caption": "of nothing"},
        {"image_id": 900},
    ]
    write_json(file, tree)
    fine, bare, stray, empty = open_source(file).read(0, 9)
    assert isinstance(fine, Pair)
    for reject, part in ((bare, "no caption"), (stray, "no such image"), (empty, "no caption")):
        assert isinstance(reject, Reject)
        assert part in reject.reason
    assert stray.origin == "captions_train2014.json: annotation 1"  # type: ignore[union-attr]


def test_coco_s_odd_ids_lose_nothing_in_silence(tmp_path: Path) -> None:
    """Two files put together by hand: numbers that stand twice, and what is no number."""
    file = coco(tmp_path, "train2014", ["a.jpg", "b.jpg"])
    tree = json.loads(file.read_text())
    tree["images"].append({"id": 900, "file_name": "c.jpg"})
    tree["annotations"] = [{"image_id": 900, "caption": "a"}, {"image_id": [900], "caption": "b"}]
    write_json(file, tree)
    a, bare, twice, stray = open_source(file).read(0, 9)
    assert isinstance(a, Pair)
    assert (a.key, a.captions) == ("a.jpg", ["a"])
    assert isinstance(bare, Reject)
    assert twice == Reject(
        "c.jpg", "captions_train2014.json: image 900", "bad image: another one has the same id"
    )
    assert isinstance(stray, Reject)
    assert stray.reason == "bad annotation: no such image"
    tree["images"].append({"id": {}, "file_name": "d.jpg"})
    write_json(file, tree)
    with pytest.raises(RequestError, match=r"as 'id' and its 'file_name'; 1 of 4 are none"):
        open_source(file)


def test_coco_without_captions_or_pictures_says_so(tmp_path: Path) -> None:
    file = coco(tmp_path, "val2017", ["a.jpg"])
    (tmp_path / "val2017/a.jpg").unlink()
    with pytest.raises(RequestError, match=r"\(the first: a\.jpg\) is in any of .*val2017"):
        open_source(file)
    tree = json.loads(file.read_text())
    boxes = [{"image_id": 900, "bbox": [0, 0, 1, 1]}]
    write_json(tmp_path / "boxes.json", tree | {"annotations": boxes})
    with pytest.raises(RequestError, match="annotations have no 'caption'"):
        open_source(tmp_path / "boxes.json")
    write_json(tmp_path / "other.json", {"hello": 1})
    with pytest.raises(RequestError, match=r"an array of objects.*an object with 'hello'"):
        open_source(tmp_path / "other.json")


def test_a_json_array_is_a_table(tmp_path: Path) -> None:
    rows = [{"image": "a.jpg", "caption": "one"}, "x", {"image": "a.jpg", "caption": 2.50}]
    write_json(tmp_path / "data.json", rows)
    pair, reject = open_source(tmp_path / "data.json").read(0, 9)
    assert isinstance(pair, Pair)
    assert pair.captions == ["one", "2.5"]
    assert isinstance(reject, Reject)
    assert reject.origin == "data.json:2"


# --- parquet and arrow


def table(count: int) -> pa.Table:
    """Pictures as structs: every third has a path beside its bytes, the last has a path alone."""
    images = [
        {"bytes": b"picture %d" % i, "path": f"{i}.png" if i % 3 == 0 else None}
        for i in range(count - 1)
    ]
    images.append({"bytes": None, "path": "outside.png"})
    columns = {
        "image": pa.array(images, IMAGE),
        "caption": pa.array([f"number {i}" for i in range(count)]),
        "other": pa.array(range(count)),
    }
    return pa.table(columns)


def write(file: Path, content: pa.Table) -> None:
    """By its suffix; several row groups or batches, so that rows are not where they seem."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(content, file, row_group_size=100)
    elif file.suffix == ".feather":
        pyarrow.feather.write_feather(content, file, compression="lz4", chunksize=90)
    else:  # the stream format, as `datasets` writes it
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, content.schema) as out:
            out.write_table(content, max_chunksize=70)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_tables_with_pictures_inside(tmp_path: Path, suffix: str) -> None:
    count = 4 * BATCH + 7
    write(tmp_path / f"t.{suffix}", table(count))
    (tmp_path / "outside.png").write_bytes(b"by path")
    source = open_source(tmp_path / f"t.{suffix}")
    assert (source.kind, len(source)) == ("columns", count)
    found = pairs(source)
    assert [pair.image for pair in found[:-1]] == [b"picture %d" % i for i in range(count - 1)]
    assert found[-1].image == tmp_path / "outside.png"
    assert [pair.captions for pair in found] == [[f"number {i}"] for i in range(count)]
    assert (found[3].key, found[4].key) == ("3.png", f"t.{suffix}:4")
    assert found[4].origin == f"t.{suffix}:4"
    for row in (count - 2, 150, 3, 151, 150):  # in any order, as tasks may come
        pair = source.items[row].read()
        assert isinstance(pair, Pair)
        assert pair.image == b"picture %d" % row


def test_a_column_of_bytes_lists_of_captions_and_dictionaries(tmp_path: Path) -> None:
    """img2dataset's own parquet output: a failed row has no picture."""
    content = pa.table(
        {
            "url": ["https://x/1", "https://x/2", "https://x/3"],
            "caption": pa.array([["one", None], ["two"], []], pa.list_(pa.string())),
            "status": pa.array(["success"] * 3).dictionary_encode(),
            "jpg": pa.array([b"1", None, b"3"], pa.large_binary()),
            "group": [7, None, 7],
        }
    )
    write(tmp_path / "00000.parquet", content)
    first, failed, bare = open_source(tmp_path).read(0, 9)
    assert isinstance(first, Pair)
    assert (first.image, first.captions, first.group) == (b"1", ["one"], "7")
    assert failed == Reject("00000.parquet:1", "00000.parquet:1", "no picture: 'jpg' is empty")
    assert isinstance(bare, Reject)
    assert bare.reason.startswith("no caption")


def test_tables_of_paths_join_the_captions_of_a_picture(tmp_path: Path) -> None:
    content = pa.table(
        {
            "file_name": pa.array(["a.jpg", "b.jpg", "a.jpg", None]).dictionary_encode(),
            "text": ["one", "two", "three", "four"],
            "split": ["train", "test", "train", None],
        }
    )
    write(tmp_path / "x.arrow", content)
    a, b, reject = open_source(tmp_path / "x.arrow").read(0, 9)
    assert isinstance(a, Pair)
    assert (a.image, a.captions, a.split) == (tmp_path / "a.jpg", ["one", "three"], "train")
    assert isinstance(b, Pair)
    assert b.split == "test"
    assert reject == Reject("", "x.arrow:3", "bad row: no image path under 'file_name'")
    before = open_source(tmp_path / "x.arrow").fingerprint
    (tmp_path / "a.jpg").write_bytes(b"now it is there")
    assert open_source(tmp_path / "x.arrow").fingerprint != before


def test_a_hub_s_folder_names_its_splits(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001"):
        write(tmp_path / "data" / f"{name}.parquet", table(2))
    write(tmp_path / "more.parquet", table(1))
    (tmp_path / "README.md").write_text("about it")
    splits = [item.split for item in open_source(tmp_path).items]  # type: ignore[attr-defined]
    assert splits == [None, *["train"] * 4, *["val"] * 2]  # the folder's own files come first


def test_columns_that_are_not_there_are_named_with_their_types(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", table(3).rename_columns(["image", "n", "other"]))
    assert len(open_source(tmp_path / "x.parquet")) == 3  # the only column of strings
    content = pa.table({"url": ["https://x/1"], "caption": ["a"], "score": [1.0]})
    write(tmp_path / "y.parquet", content)
    with pytest.raises(RequestError, match=r"no column for the caption.*score \(double\)"):
        open_source(tmp_path / "y.parquet", image_key="url", caption_key="score")
    write(tmp_path / "z.parquet", content.append_column("b", pa.array(["x"])))
    with pytest.raises(RequestError, match=r"for the image, of bytes, paths.*not downloaded"):
        open_source(tmp_path / "z.parquet")
    write(tmp_path / "u.parquet", pa.table({"images": [[b"1"]], "caption": ["a"]}))
    with pytest.raises(RequestError, match=r"no column for the image.*images \(list<"):
        open_source(tmp_path / "u.parquet")  # captions are no paths
    write(tmp_path / "v.parquet", pa.table({"file_name": ["1.jpg"], "class": [3]}))
    with pytest.raises(RequestError, match=r"no column for the caption.*class \(int64\)"):
        open_source(tmp_path / "v.parquet")  # nor paths captions
    (tmp_path / "w.arrow").write_bytes(b"ARROW1 but no more")
    with pytest.raises(RequestError, match="cannot be read as arrow"):
        open_source(tmp_path / "w.arrow")


def test_a_table_damaged_later_costs_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    write(file, table(120))
    source = open_source(file)
    data = bytearray(file.read_bytes())
    data[4:200] = bytes(196)
    file.write_bytes(data)
    reads = [item.read() for item in source.items[:3]]
    assert all(isinstance(one, Reject) and "unreadable" in one.reason for one in reads), reads


# --- datasets saved to disk


def save(folder: Path, count: int, split: str | None, files: int) -> None:
    """As `datasets` 5.2 writes a Dataset (checked against it by hand)."""
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    content = table(count)
    for i, name in enumerate(names):
        write(folder / name, content.slice(i * count // files, count // files))
    state = {"_data_files": [{"filename": name} for name in names], "_split": split}
    write_json(folder / "state.json", state | {"_fingerprint": "0", "_format_type": None})
    write_json(folder / "dataset_info.json", {"features": {}})


def test_a_saved_dataset_and_a_saved_dict(tmp_path: Path) -> None:
    save(tmp_path / "one", 12, None, 2)
    source = open_source(tmp_path / "one")
    assert (source.kind, len(source)) == ("datasets", 12)
    assert [pair.captions[0] for pair in pairs(source)] == [f"number {i}" for i in range(12)]
    save(tmp_path / "dict/train", 6, None, 3)
    save(tmp_path / "dict/validation", 2, None, 1)
    write_json(tmp_path / "dict/dataset_dict.json", {"splits": ["train", "validation"]})
    found = pairs(open_source(tmp_path / "dict"))
    assert [pair.split for pair in found] == ["train"] * 6 + ["val"] * 2
    save(tmp_path / "test", 2, "test", 1)
    assert pairs(open_source(tmp_path / "test"))[0].split == "test"


def test_a_saved_dict_with_other_splits_or_missing_files(tmp_path: Path) -> None:
    save(tmp_path / "dict/unlabelled", 2, None, 1)
    write_json(tmp_path / "dict/dataset_dict.json", {"splits": ["unlabelled"]})
    with pytest.raises(RequestError, match=r"called unlabelled; expected.*dict/unlabelled\."):
        open_source(tmp_path / "dict")
    assert pairs(open_source(tmp_path / "dict/unlabelled"))[0].split is None
    (tmp_path / "dict/unlabelled/data-00000-of-00001.arrow").unlink()
    with pytest.raises(RequestError, match=r"names .*\.arrow, which is not there"):
        open_source(tmp_path / "dict/unlabelled")
    for files in ([], None, ["data.arrow"], [{"name": "data.arrow"}], 3):
        write_json(tmp_path / "dict/unlabelled/state.json", {"_data_files": files})
        message = r"names no data files" if files == [] else r"state\.json: expected '_data_files'"
        with pytest.raises(RequestError, match=message):
            open_source(tmp_path / "dict/unlabelled")
    write_json(tmp_path / "dict/dataset_dict.json", {"splits": None})
    with pytest.raises(RequestError, match="the splits are called nothing"):
        open_source(tmp_path / "dict")


# --- img2dataset


def test_img2dataset_s_failures_are_rejects(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "00000.tar", "w") as tar:
        for name, data in (
            ("000000000.jpg", b"zero"),
            ("000000000.txt", b"caption zero"),
            ("000000000.json", b'{"caption": "other", "status": "success"}'),
            ("000000002.jpg", b"two"),
            ("000000002.json", b'{"caption": "caption two", "status": "success"}'),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    log = pa.table(
        {
            "url": [f"https://x/{i}" for i in range(4)],
            "key": [f"{i:09d}" for i in range(4)],
            "status": ["success", "failed_to_download", "success", "success"],
            "error_message": [None, "HTTP Error 404: Not Found", None, None],
        }
    )
    write(tmp_path / "00000.parquet", log)
    write_json(tmp_path / "00000_stats.json", {"count": 4})
    source = open_source(tmp_path)
    assert source.kind == "img2dataset"
    zero, two, failed, lost = source.read(0, 9)
    assert isinstance(zero, Pair)
    assert (zero.image, zero.captions) == (b"zero", ["caption zero"])
    assert isinstance(two, Pair)
    assert two.captions == ["caption two"]
    assert failed == Reject(
        "000000001", "00000.parquet:1", "not fetched: HTTP Error 404: Not Found"
    )
    assert isinstance(lost, Reject)
    assert lost.reason.startswith("not in the tar")
    (tmp_path / "00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(RequestError, match=r"00000\.parquet cannot be read"):
        open_source(tmp_path)


# --- class folders


def test_class_folders_need_templates(tmp_path: Path) -> None:
    for name in ("red_fruit/1.jpg", "red_fruit/deep/2.png", "chair/3.jpg", "stray.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(RequestError, match=r"(?s)holding 3 x \.jpg, 1 x \.png.*--templates 'a ph"):
        open_source(tmp_path)
    with pytest.raises(RequestError, match=r"'a photo': no \{\}"):
        open_source(tmp_path, templates=("a photo",))
    source = open_source(tmp_path, templates=("a {}", "{} on a table"))
    assert source.kind == "classes"
    stray, chair, fruit, deep = source.read(0, 9)
    assert isinstance(chair, Pair)
    assert (chair.captions, chair.label) == (["a chair", "chair on a table"], "chair")
    assert (chair.group, chair.split) == (None, None)
    assert [one.label for one in (fruit, deep) if isinstance(one, Pair)] == ["red fruit"] * 2
    assert isinstance(stray, Reject)
    names = tmp_path / "names.json"
    write_json(names, {"chair": "throne", "red_fruit": "apple"})
    named = open_source(tmp_path, templates=("a {}",), classes=names)
    assert named.items[1].read().captions == ["a throne"]  # type: ignore[union-attr]
    write_json(names, {"chair": "throne"})
    with pytest.raises(RequestError, match="names no class for the folder 'red_fruit'"):
        open_source(tmp_path, templates=("a {}",), classes=names)


def test_class_folders_below_their_splits(tmp_path: Path) -> None:
    for name in ("train/cat/1.jpg", "val/cat/2.jpg", "test/dog/3.jpg"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"")
    found = pairs(open_source(tmp_path, templates=("{}",)))
    assert [(pair.label, pair.split) for pair in found] == [
        ("dog", "test"),
        ("cat", "train"),
        ("cat", "val"),
    ]
