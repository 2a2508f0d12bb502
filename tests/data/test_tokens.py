"""The stored token ids of a dataset's captions."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import open_clip.tokenizer
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pennyclip.base.errors import RunError
from pennyclip.data.index import ROW, SCHEMA_VERSION, Dataset
from pennyclip.data.text import ClipTokenizer
from pennyclip.data.tokens import TokenStore

TOKENIZER = ClipTokenizer()
SHARDS = [
    [["a dog", "a dog, running"], ["cat"]],
    [["a red house on a hill by the sea"], ["one", "two", "three !"]],
]


def write_dataset(folder: Path, shards: Sequence[Sequence[list[str]]], fingerprint: str) -> Dataset:
    """A dataset with captions and without pictures: shards of rows of captions."""
    for name in ("shards", "index"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    entries = []
    for number, rows in enumerate(shards):
        table = pa.table({"captions": pa.array(rows, pa.list_(pa.string()))})
        pq.write_table(table, folder / "index" / f"{number:06d}.parquet")
        (folder / "shards" / f"{number:06d}.tar").touch()
        entries.append({"path": f"shards/{number:06d}.tar", "rows": len(rows), "bytes": 0})
    counts = [(number, len(row)) for number, rows in enumerate(shards) for row in rows]
    index = np.zeros(len(counts), ROW)
    index["shard"], index["captions"] = np.array(counts).T
    np.save(folder / "index" / "rows.npy", index)
    meta = {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": fingerprint,
        "shards": entries,
        "counts": {"kept": len(index)},
        "preprocess": {},
    }
    (folder / "dataset.json").write_text(json.dumps(meta))
    return Dataset(folder)


class Counting(ClipTokenizer):
    """Counts what it is asked to encode."""

    calls = 0

    def encode(self, text: str) -> list[int]:
        self.calls += 1
        return super().encode(text)


def test_captions_by_number(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, SHARDS, "f")
    store = TokenStore.open(dataset, TOKENIZER)
    flat = [caption for rows in SHARDS for captions in rows for caption in captions]
    assert len(store) == len(flat) == 7
    assert [store.caption(n) for n in range(7)] == [TOKENIZER.encode(c) for c in flat]
    third_of_last_row = int(dataset.caption_starts[3]) + 2
    assert store.caption(third_of_last_row) == TOKENIZER.encode("three !")
    assert store.fingerprint == TOKENIZER.fingerprint
    assert isinstance(store.ids, np.memmap)
    assert store.ids.dtype == np.uint16


def test_batch_equals_open_clip(tmp_path: Path) -> None:
    store = TokenStore.open(write_dataset(tmp_path, SHARDS, "f"), TOKENIZER)
    texts = ["three !", "a dog", "a red house on a hill by the sea", "a dog"]
    tokens, lengths = store.batch(np.array([6, 0, 3, 0]), 77)
    assert tokens.dtype == lengths.dtype == np.int64
    assert tokens.shape == (4, 16)  # the longest has 11 ids
    assert lengths.tolist() == [4, 4, 11, 4]
    np.testing.assert_array_equal(tokens, open_clip.tokenizer.tokenize(texts, 16).numpy())
    cut, lengths = store.batch(np.array([6, 0, 3, 0]), 5)
    np.testing.assert_array_equal(cut, open_clip.tokenizer.tokenize(texts, 5).numpy())
    assert lengths.tolist() == [4, 4, 5, 4]


def test_truncation_is_reported(tmp_path: Path) -> None:
    """Case 4 of the ten with known answers."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "big"]
    ordinary = [f"picture number {word}" for word in words]
    captions = ["dog " * 200, "a", *ordinary]
    store = TokenStore.open(write_dataset(tmp_path, [[[c] for c in captions]], "f"), TOKENIZER)
    tokens, lengths = store.batch(np.arange(10), 77)
    assert tokens.shape == (10, 77)
    assert lengths.tolist() == [77, 3, *[5] * 8]
    assert tokens[0, -1] == 49407
    assert tokens[0, :-1].tolist() == [49406, *[1929] * 75]
    assert len(store.caption(0)) == 202
    assert store.truncated(77) == (1, 10)
    assert "1 of 10 truncated (10 %)" in store.truncation_report(77)
    assert store.truncated(4) == (9, 10)
    assert store.truncated(202) == (0, 10)


def test_made_once_and_again_for_another_dataset(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, SHARDS, "f")
    tokenizer = Counting()
    TokenStore.open(dataset, tokenizer)
    TokenStore.open(dataset, tokenizer)
    assert tokenizer.calls == 7
    names = [path.name for path in (tmp_path / "tokens").rglob("*")]
    assert sorted(names) == sorted([tokenizer.fingerprint, "ids.npy", "starts.npy", "meta.json"])
    changed = [[[c.replace("dog", "cow") for c in row] for row in rows] for rows in SHARDS]
    store = TokenStore.open(write_dataset(tmp_path, changed, "g"), tokenizer)
    assert tokenizer.calls == 14
    assert store.caption(0) == TOKENIZER.encode("a cow")


def test_large_vocabularies_take_wider_ids(tmp_path: Path) -> None:
    class Wide:
        context_length, vocab_size, fingerprint = 8, 250_002, "wide"

        def encode(self, text: str) -> list[int]:
            return [0, 250_001, 2]

    store = TokenStore.open(write_dataset(tmp_path, SHARDS, "f"), Wide())
    assert store.ids.dtype == np.uint32
    assert store.batch(np.array([1]), 8)[0].tolist() == [[0, 250_001, 2, 0, 0, 0, 0, 0]]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, SHARDS, "f")
    dataset.rows = np.array(dataset.rows)
    dataset.rows["captions"][3] = 2
    with pytest.raises(RunError, match=r"000001\.parquet .*rows 2 to 3: the dataset is damaged"):
        TokenStore.open(dataset, TOKENIZER)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_two_runs_at_once(tmp_path: Path) -> None:
    """Another run finishes the same store first: this one takes it."""
    dataset = write_dataset(tmp_path, SHARDS, "f")

    class Overtaken(ClipTokenizer):
        def encode(self, text: str) -> list[int]:
            if text == "two":
                other = TokenStore.open(write_dataset(tmp_path / "copy", SHARDS, "f"), TOKENIZER)
                made = tmp_path / "copy" / "tokens" / other.fingerprint
                made.rename(tmp_path / "tokens" / other.fingerprint)
            return super().encode(text)

    store = TokenStore.open(dataset, Overtaken())
    assert store.caption(0) == TOKENIZER.encode("a dog")
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [store.fingerprint]
