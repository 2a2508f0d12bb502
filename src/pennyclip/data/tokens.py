"""The token ids of every caption of a dataset, made once for one tokenizer and memory-mapped.

    tokens/<fingerprint>/ids.npy      every caption's ids, whole, one after the other
    tokens/<fingerprint>/starts.npy   int64 [captions + 1]: where each caption begins
    tokens/<fingerprint>/meta.json    the dataset that it was made from

The context length is not part of it: captions are cut when they are read.
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pennyclip.base.atomic import remove, replacing
from pennyclip.base.errors import RunError
from pennyclip.data.index import Dataset
from pennyclip.data.order import I64
from pennyclip.data.text import Tokenizer, padded_length
from pennyclip.data.writers import ArrayWriter


class TokenStore:
    """Captions as token ids, by caption number: `dataset.caption_starts[row] + k`."""

    def __init__(self, folder: Path) -> None:
        self.fingerprint = folder.name
        """The tokenizer's."""
        self.ids: npt.NDArray[Any] = np.load(folder / "ids.npy", mmap_mode="r")
        self.starts: I64 = np.load(folder / "starts.npy", mmap_mode="r")

    @classmethod
    def open(cls, dataset: Dataset, tokenizer: Tokenizer) -> "TokenStore":
        """The dataset's store for this tokenizer; it is made where it is absent.

        Raises:
            RunError: the index and the rows disagree about the number of captions.
        """
        folder = dataset.path / "tokens" / tokenizer.fingerprint
        meta = folder / "meta.json"
        if folder.exists() and (
            not meta.is_file() or json.loads(meta.read_text())["dataset"] != dataset.fingerprint
        ):
            remove(folder)  # of a dataset that was prepared anew in the same place
        if not folder.exists():
            _build(dataset, tokenizer, folder)
        return cls(folder)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def caption(self, number: int) -> list[int]:
        """Ids of one whole caption, with its start and end tokens."""
        return self.ids[self.starts[number] : self.starts[number + 1]].tolist()

    def batch(self, numbers: I64, context_length: int) -> tuple[I64, I64]:
        """Captions cut to the context length and padded.

        Args:
            numbers: [B] caption numbers.
            context_length: most ids a caption may keep; a cut caption keeps its end token.

        Returns:
            tokens [B, L], 0 behind each caption, and lengths [B]. L is as `text.pad` has it.
        """
        begin, end = self.starts[numbers], self.starts[numbers + 1]
        lengths = np.minimum(end - begin, context_length)
        longest = int(lengths.max(initial=0))
        columns = np.arange(padded_length(longest, context_length))
        inside = columns < lengths[:, None]
        tokens = np.zeros(inside.shape, np.int64)
        tokens[inside] = self.ids[(begin[:, None] + columns)[inside]]
        tokens[np.arange(len(tokens)), lengths - 1] = self.ids[end - 1]
        return tokens, lengths

    def truncated(self, context_length: int) -> tuple[int, int]:
        """How many captions are longer than the context length, and how many there are."""
        return int((np.diff(self.starts) > context_length).sum()), len(self)

    def truncation_report(self, context_length: int) -> str:
        """One line for people: what the context length costs."""
        count, total = self.truncated(context_length)
        share = f"{100 * count / total:.2g} %"
        return f"captions: {count} of {total} truncated ({share}) to {context_length} tokens"


def _build(dataset: Dataset, tokenizer: Tokenizer, folder: Path) -> None:
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    counts = [0]
    with replacing(folder) as partial:
        partial.mkdir()
        with (partial / "ids.npy").open("wb") as file:
            ids = ArrayWriter(file, dtype)
            for captions in _captions(dataset):
                encoded = [tokenizer.encode(caption) for caption in captions]
                counts += map(len, encoded)
                ids.add(list(chain.from_iterable(encoded)))
            ids.close()
        np.save(partial / "starts.npy", np.cumsum(counts, dtype=np.int64))
        (partial / "meta.json").write_text(json.dumps({"dataset": dataset.fingerprint}) + "\n")


def _captions(dataset: Dataset) -> Iterator[list[str]]:
    """The captions of each shard, in the order of rows."""
    first = 0
    for shard in range(len(dataset.meta["shards"])):
        index = dataset.index_path(shard)
        column = pq.read_table(index, columns=["captions"])["captions"]
        counts = dataset.rows["captions"][first : first + len(column)]
        if not np.array_equal(pc.list_value_length(column).to_numpy(), counts):
            raise RunError(
                f"{index} and rows.npy beside it disagree about the captions of rows {first} to "
                f"{first + len(column) - 1}: the dataset is damaged. Prepare it again."
            )
        yield pc.list_flatten(column).to_pylist()
        first += len(column)
    if first != len(dataset):
        raise RunError(
            f"{dataset.path}/index describes {first} rows and rows.npy {len(dataset)}: the "
            "dataset is damaged. Prepare it again."
        )
