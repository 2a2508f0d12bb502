"""A process of its own, whose memory test_loader_memory.py looks at.

    python loader_memory.py DATASET ROWS EPOCHS

Makes batches of a dataset whose rows were repeated up to ROWS, and prints the bytes that the
process has to itself after each epoch (of at most `BATCHES`). Pages of mapped files don't count:
the system drops them when it needs the room.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pennyclip.config.keys import Augment
from pennyclip.data.index import ROW, Dataset
from pennyclip.data.loader import Loader
from pennyclip.data.text import ClipTokenizer
from pennyclip.data.tokens import TokenStore

BATCH, BATCHES, PART = 32, 4, 1 << 18


def enlarge(dataset: Path, count: int) -> None:
    """Repeat the rows, one caption each, in files that are written a part at a time."""
    rows = np.load(dataset / "index/rows.npy")
    rows["captions"] = 1
    shape = {"dtype": ROW, "shape": (count,)}
    more = np.lib.format.open_memmap(dataset / "index/rows.npy", "w+", **shape)
    tokens = dataset / "tokens" / ClipTokenizer().fingerprint
    tokens.mkdir(parents=True, exist_ok=True)
    np.lib.format.open_memmap(tokens / "ids.npy", "w+", np.uint16, (4 * count,))[-1] = 49407
    starts = np.lib.format.open_memmap(tokens / "starts.npy", "w+", np.int64, (count + 1,))
    schema = pa.schema([("row", pa.int64())])
    with pq.ParquetWriter(dataset / "keep/train.parquet", schema) as keep:
        for first in range(0, count, PART):
            ids = np.arange(first, min(first + PART, count))
            more[ids] = rows[ids % len(rows)]
            starts[ids + 1] = 4 * (ids + 1)
            keep.write_table(pa.table({"row": ids}))
    meta = json.loads((dataset / "dataset.json").read_text())
    meta["counts"]["kept"] = meta["shards"][0]["rows"] = count
    (dataset / "dataset.json").write_text(json.dumps(meta))
    (tokens / "meta.json").write_text(json.dumps({"dataset": meta["fingerprint"]}))


def own_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


def main() -> None:
    path, count, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dataset, tokenizer = Dataset(path), ClipTokenizer()
    loader = Loader(
        dataset=dataset,
        rows=dataset.subset("train"),
        tokens=TokenStore.open(dataset, tokenizer),
        tokenizer=tokenizer,
        batch_size=BATCH,
        seed=0,
        image_size=32,
        text_length=77,
        augment=Augment(crop_scale=(0.8, 1.0), word_dropout=0.1),
        workers=2,
    )
    assert len(loader.rows) == count
    found = []
    for epoch in range(epochs):
        first = epoch * count // BATCH
        for batch in loader.batches(first, first + min(BATCHES, count // BATCH)):
            assert len(batch.rows.unique()) == BATCH
        found.append(own_bytes())
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "enlarge":
        enlarge(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
