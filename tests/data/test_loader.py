"""Batches: the same whoever asks for them, and nothing that grows with time or rows."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Augment
from pennyclip.data.augment import change_pixels
from pennyclip.data.index import OPEN_SHARDS, ROW, SCHEMA_VERSION, Dataset
from pennyclip.data.loader import Batch, Loader
from pennyclip.data.order import Order
from pennyclip.data.synonyms import Synonyms
from pennyclip.data.text import ClipTokenizer
from pennyclip.data.tokens import TokenStore

BATCH = 8
EPOCH = 12  # batches: 96 of the small dataset's rows
EVERYTHING = Augment(
    crop_scale=(0.5, 1.0), flip=0.5, color_jitter=0.3, word_dropout=0.3, synonyms=0.3
)


def loader(dataset: Path, **changed: Any) -> Loader:
    opened, tokenizer = Dataset(dataset), ClipTokenizer()
    fields = {
        "dataset": opened,
        "rows": opened.subset("train")[: BATCH * EPOCH],
        "tokens": TokenStore.open(opened, tokenizer),
        "tokenizer": tokenizer,
        "batch_size": BATCH,
        "seed": 3,
        "image_size": 24,
        "text_length": 16,
        "augment": Augment(),
        "workers": 0,
    }
    return Loader(**(fields | changed))


def equal(one: Batch, other: Batch) -> bool:
    assert one.images is not None
    assert one.tokens is not None
    return (
        torch.equal(one.rows, other.rows)
        and torch.equal(one.images, other.images)
        and torch.equal(one.tokens, other.tokens)
        and torch.equal(one.lengths, other.lengths)
        and torch.equal(one.groups, other.groups)
    )


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("world", "workers"), [(2, 1), (4, 2)])
def test_ranks_and_workers_give_one_and_the_same_sequence(
    world: int, workers: int, window: int | None, small_dataset: Path, wordnet: Path
) -> None:
    """The parts of all ranks, one behind the other, are the batch of a single one."""
    more = {"augment": EVERYTHING, "synonyms": Synonyms(wordnet), "shuffle_window": window}
    alone = loader(small_dataset, **more)
    ranks = [
        loader(small_dataset, rank=rank, world=world, workers=workers, **more)
        for rank in range(world)
    ]
    start, stop = EPOCH - 3, EPOCH + 3  # over an epoch's end
    together = zip(*(rank.batches(start, stop) for rank in ranks), strict=True)
    for whole, parts in zip(alone.batches(start, stop), together, strict=True):
        whole, moved = whole.to(torch.device("cpu")), [p.to(torch.device("cpu")) for p in parts]
        assert torch.equal(whole.rows, torch.cat([part.rows for part in moved]))
        assert torch.equal(whole.images, torch.cat([part.images for part in moved]))
        assert torch.equal(whole.lengths, torch.cat([part.lengths for part in moved]))
        for part, tokens in zip(moved, whole.tokens.chunk(world), strict=True):
            length = min(part.tokens.shape[1], tokens.shape[1])  # each to its longest caption
            assert torch.equal(part.tokens[:, :length], tokens[:, :length])
            assert part.tokens[:, length:].sum() == tokens[:, length:].sum() == 0


@pytest.mark.parametrize("window", [None, 20])
def test_a_resume_on_other_ranks_gives_each_remaining_row_once(
    window: int | None, small_dataset: Path
) -> None:
    """Half of an epoch on one rank, a quarter on 4 x 2, the rest on 2 x 1."""
    seen = []
    for world, workers, start, stop in ((1, 0, 0, 6), (4, 2, 6, 9), (2, 1, 9, 12)):
        for rank in range(world):
            part = loader(
                small_dataset, rank=rank, world=world, workers=workers, shuffle_window=window
            )
            seen += [row for batch in part.batches(start, stop) for row in batch.rows.tolist()]
    assert sorted(seen) == sorted(loader(small_dataset).rows.tolist())


def test_images_change_on_the_device_once(small_dataset: Path) -> None:
    plain = loader(small_dataset, augment=Augment(crop_scale=(0.5, 1.0))).batch(2)
    batch = loader(small_dataset, augment=EVERYTHING).batch(2)
    assert torch.equal(batch.images, plain.images)
    assert batch.changes is not None
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.images, change_pixels(plain.images, batch.changes))
    assert not torch.equal(moved.images, plain.images)
    assert torch.equal(moved.to(torch.device("cpu")).images, moved.images)


def test_changed_captions_become_tokens_as_stored_ones_do(small_dataset: Path) -> None:
    stored = loader(small_dataset, text_length=12)
    read = loader(small_dataset, text_length=12, augment=Augment(word_dropout=1e-12))
    assert all(equal(stored.batch(number), read.batch(number)) for number in range(EPOCH))
    dropping = loader(small_dataset, text_length=12, augment=Augment(word_dropout=0.5))
    batch, plain = dropping.batch(0), stored.batch(0)
    tokenizer = ClipTokenizer()
    for place, row in enumerate(batch.rows.tolist()):
        known = [tokenizer.encode(c) for c in stored.dataset.captions(row)]
        ids = batch.tokens[place, : batch.lengths[place]].tolist()
        assert ids[0] == tokenizer.START
        assert ids[-1] == tokenizer.END
        assert any(set(ids) <= set(one) for one in known)
    assert batch.lengths.sum() < plain.lengths.sum()


@settings(max_examples=50)
@given(
    shards=st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any),
    window=st.integers(2, 150),
    epoch=st.integers(0, 3),
)
def test_a_windowed_epoch_holds_each_row_once(shards: list[int], window: int, epoch: int) -> None:
    order = Order(5, np.array(shards), window)
    size = order.size
    indices, epochs = order.at(epoch * size, size)
    assert np.array_equal(np.sort(indices), np.arange(size))
    assert (epochs == epoch).all()
    parts = [order.at(epoch * size + at, min(7, size - at))[0] for at in range(0, size, 7)]
    assert np.array_equal(np.concatenate(parts), indices)


def test_a_window_reads_few_shards_and_every_epoch_others() -> None:
    shards, window = np.full(50, 100), 400
    order = Order(0, shards, window)
    first, second = (order.at(start, 4800)[0].reshape(-1, window) for start in (0, 5000))
    sets = [[set((part // 100).tolist()) for part in epoch] for epoch in (first, second)]
    assert {len(one) for epoch in sets for one in epoch} == {4}
    assert len({tuple(sorted(one)) for epoch in sets for one in epoch}) == 24
    for part in first:  # well mixed inside: neighbours seldom stay together
        assert (np.diff(part) == 1).mean() < 0.03
        assert abs(np.corrcoef(part, np.arange(window))[0, 1]) < 4 / window**0.5
    assert Order(1, shards, window).at(0, 400)[0].tolist() != first[0].tolist()


def test_many_shards_need_few_open_files(tmp_path: Path) -> None:
    """More than may be open, of one row and nothing but its caption each."""
    count = OPEN_SHARDS + 40
    rows, shards = np.zeros(count, ROW), []
    for name in ("shards", "index"):
        (tmp_path / name).mkdir()
    for number in range(count):
        text = f"number {number}".encode()
        (tmp_path / f"shards/{number:06d}.tar").write_bytes(text)
        shards.append({"path": f"shards/{number:06d}.tar", "rows": 1, "bytes": len(text)})
        rows["shard"][number], rows["text_length"][number] = number, len(text)
    np.save(tmp_path / "index/rows.npy", rows)
    meta = {"schema_version": SCHEMA_VERSION, "preprocess": {}, "counts": {"kept": count}}
    (tmp_path / "dataset.json").write_text(json.dumps(meta | {"shards": shards}))
    before = len(os.listdir("/proc/self/fd"))
    many = Dataset(tmp_path)
    assert [many.captions(row) for row in range(count)] == [[f"number {i}"] for i in range(count)]
    assert len(os.listdir("/proc/self/fd")) <= before + OPEN_SHARDS + 1  # and rows.npy
    assert many.captions(0) == ["number 0"]  # whose file was closed
    (tmp_path / "shards/000007.tar").unlink()
    with pytest.raises(
        RequestError, match=rf"lacks 1 of its {count} shard files \(.*shards/000007\.tar is absent"
    ):
        Dataset(tmp_path)
