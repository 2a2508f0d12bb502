"""Embeddings of a whole dataset by one model: float16, a file a shard; a killed run goes on.

    dataset/embeddings/FINGERPRINT/000123-DIGEST.npy    [images or captions of the shard, D]

The fingerprint covers the model's weights and all that decides its input, the digest the shard's
bytes: files are found again by any run with that model, and outlive shards that are added later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pennyclip.base.atomic import replacing
from pennyclip.base.errors import RunError
from pennyclip.data.index import Dataset
from pennyclip.data.loader import PREPROCESSING
from pennyclip.data.order import I64
from pennyclip.data.stored import Array, Stored
from pennyclip.data.tokens import TokenStore
from pennyclip.evaluation.features import (
    Progress,
    computation,
    embed_captions,
    embed_images,
    fingerprint,
    stored_image_features,
    stored_text_features,
)
from pennyclip.model.clip import CLIP


@dataclass(frozen=True)
class Embeddings:
    """Unit-norm embeddings of all images, or of all captions, of a dataset; memory-mapped."""

    parts: Sequence[Array]
    """[n, D] a shard."""
    starts: I64
    """[shards + 1] number of the first entry of each."""
    fingerprint: str
    """Of what computed them."""

    def take(self, numbers: I64) -> Float[Tensor, "B D"]:
        """Some of them in float32, by their numbers in the dataset."""
        out = np.empty((len(numbers), self.parts[0].shape[1]), np.float32)
        shards = np.searchsorted(self.starts, numbers, side="right") - 1
        for shard in np.unique(shards).tolist():
            inside = shards == shard
            out[inside] = self.parts[shard][numbers[inside] - self.starts[shard]]
        return torch.from_numpy(out)


def image_embeddings(model: CLIP, dataset: Dataset, chunk: int, progress: Progress) -> Embeddings:
    """Every row's image embedding, found or computed. Stored features of the trunk are used.

    Raises:
        RunError: an embedding is not finite.
    """
    tower = model.visual
    store: Stored | None = None

    def compute(rows: I64) -> Tensor:
        nonlocal store
        store = store or stored_image_features(model, dataset)
        return embed_images(model, dataset, rows, chunk, store)

    inputs = (PREPROCESSING, tower.image_size, computation(tower.config))
    name = fingerprint(tower.state_dict(), *inputs)
    starts, width = dataset.shard_starts, model.config.embed_dim
    return _by_shard(dataset, name, starts, width, compute, "image embeddings", progress)


def text_embeddings(
    model: CLIP, dataset: Dataset, tokens: TokenStore, chunk: int, progress: Progress
) -> Embeddings:
    """Every caption's embedding, likewise."""
    tower = model.text
    store: Stored | None = None

    def compute(numbers: I64) -> Tensor:
        nonlocal store
        store = store or stored_text_features(model, dataset, tokens)
        return embed_captions(model, tokens, numbers, chunk, store)

    inputs = (tokens.fingerprint, tower.context_length, computation(model.config.text))
    name = fingerprint(tower.state_dict(), *inputs)
    starts, width = dataset.caption_starts[dataset.shard_starts], model.config.embed_dim
    return _by_shard(dataset, name, starts, width, compute, "text embeddings", progress)


def _by_shard(
    dataset: Dataset,
    name: str,
    starts: I64,
    width: int,
    compute: Callable[[I64], Tensor],
    what: str,
    progress: Progress,
) -> Embeddings:
    parts: list[Array] = []
    for number, shard in enumerate(dataset.meta["shards"]):
        if starts[number] == starts[number + 1]:  # all of its inputs were refused
            parts.append(np.empty((0, width), np.float16))
            continue
        stem = f"{Path(shard['path']).stem}-{shard['blake2b'][:16]}"
        file = dataset.path / "embeddings" / name / f"{stem}.npy"
        if not file.is_file():
            values = compute(np.arange(starts[number], starts[number + 1])).to(torch.float16)
            if not torch.isfinite(values).all():
                raise RunError(f"{what} of shard {stem} are not finite: the model is broken.")
            with replacing(file) as partial, partial.open("wb") as out:
                np.save(out, values.numpy())
            progress(what, int(starts[number + 1]), int(starts[-1]))
        parts.append(np.load(file, mmap_mode="r"))
    return Embeddings(parts, starts, name)
