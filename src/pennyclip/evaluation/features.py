"""Embeddings of whole row sets, and what frozen layers compute, once for a dataset.

Stores lie in dataset/embeddings/<fingerprint>. The fingerprint covers the frozen layers' weights
and everything that decides their input, so that a store is found again by any run with the same
frozen layers, and by no other.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from pennyclip.config.keys import ClipText, ImageTower, TransformersText
from pennyclip.data.index import Dataset
from pennyclip.data.loader import PREPROCESSING, load_images
from pennyclip.data.order import I64
from pennyclip.data.stored import Array, Stored, create, find
from pennyclip.data.tokens import TokenStore
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import trunk_state

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class Stores:
    """What is stored of a dataset for each tower; None: nothing."""

    image: Stored | None = None
    text: Stored | None = None


def fingerprint(state: Mapping[str, Tensor], *inputs: object) -> str:
    """Identifies what weights compute from given inputs."""
    digest = hashlib.blake2b(repr(inputs).encode(), digest_size=12)
    for name, value in state.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def computation(config: ImageTower | ClipText | TransformersText) -> dict[str, Any]:
    """What of a tower's configuration its output depends on, beside its weights."""
    beside = {"weights", "pretrained", "drop_keys", "new_keys", "head", "head_bias", "image_size"}
    return {key: value for key, value in vars(config).items() if key not in beside}


def image_features(
    model: CLIP,
    dataset: Dataset,
    size: int,
    chunk: int,
    progress: Progress,
    layers: int | None = None,
) -> Stored:
    """What the image trunk makes of every row, found or computed.

    Args:
        size: of the images in pixels.
        layers: the first of `layers()`, which are frozen; None: all, for the trunk's features.

    Raises:
        NotStored: the disk has no room for it, or float16 no range.
    """
    tower = model.visual

    def compute() -> Iterator[tuple[I64, Tensor]]:
        for rows in _chunks(len(dataset), chunk):
            images = load_images(dataset, rows, size).to(tower.mean.device)
            yield rows, tower.features(images) if layers is None else tower.prefix(images, layers)
            progress("image features", int(rows[-1]) + 1, len(dataset))

    name = _image_trunk(model, dataset, size, layers)
    values = _stored(dataset, name, len(dataset), compute)
    return Stored(values, layers, size)


def _image_trunk(model: CLIP, dataset: Dataset, size: int, layers: int | None = None) -> str:
    tower = model.visual
    inputs = (dataset.fingerprint, PREPROCESSING, size, computation(tower.config))
    return fingerprint(trunk_state(tower, layers), *inputs)


def stored_image_features(model: CLIP, dataset: Dataset) -> Stored | None:
    """The image trunk's features at its evaluation size, where they are stored."""
    size = model.visual.image_size
    values = find(_folder(dataset, _image_trunk(model, dataset, size)))
    return None if values is None else Stored(values, None, size)


def stored_text_features(model: CLIP, dataset: Dataset, tokens: TokenStore) -> Stored | None:
    """The text trunk's features of captions at full length, where they are stored."""
    length = model.text.context_length
    values = find(_folder(dataset, _text_trunk(model, dataset, tokens, length)))
    return None if values is None else Stored(values, None, length)


def text_features(
    model: CLIP,
    dataset: Dataset,
    tokens: TokenStore,
    length: int,
    chunk: int,
    progress: Progress,
    layers: int | None = None,
) -> Stored:
    """What the text trunk makes of every caption, found or computed.

    Args:
        length: to which captions are cut, in tokens.
        layers: the first of `layers()`, which are frozen; None: all, for the trunk's features.

    Raises:
        NotStored: the disk has no room for it, or float16 no range.
    """
    tower, total = model.text, len(tokens)
    name = _text_trunk(model, dataset, tokens, length, layers)
    device = model.logit_scale.device
    whole = np.diff(tokens.starts)
    visible = tower.visible(torch.from_numpy(np.minimum(whole, length))).numpy()
    starts = np.concatenate([[0], visible.cumsum()])

    # Captions of like length together: hardly any padding.
    order = np.argsort(whole, kind="stable")

    def compute() -> Iterator[tuple[I64, Tensor]]:
        for places in _chunks(total, chunk):
            numbers = order[places]
            ids, lengths = (torch.from_numpy(a).to(device) for a in tokens.batch(numbers, length))
            if layers is None:
                yield numbers, tower.features(ids, lengths)
            else:
                states = tower.prefix(ids, lengths, layers)
                columns = np.arange(states.shape[1])
                inside = columns < visible[numbers][:, None]
                own = (starts[numbers][:, None] + columns)[inside]
                yield own, states[torch.from_numpy(inside).to(device)]
            progress("text features", int(places[-1]) + 1, total)

    if layers is None:
        return Stored(_stored(dataset, name, total, compute), layers, length)
    return Stored(_stored(dataset, name, int(starts[-1]), compute), layers, length, starts)


def _text_trunk(
    model: CLIP, dataset: Dataset, tokens: TokenStore, length: int, layers: int | None = None
) -> str:
    inputs = (dataset.fingerprint, tokens.fingerprint, length, computation(model.config.text))
    return fingerprint(trunk_state(model.text, layers), *inputs)


def _chunks(count: int, size: int) -> Iterator[I64]:
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))


@torch.no_grad()
def _stored(
    dataset: Dataset, name: str, count: int, compute: Callable[[], Iterator[tuple[I64, Tensor]]]
) -> Array:
    found = find(_folder(dataset, name))
    return create(_folder(dataset, name), count, compute()) if found is None else found


def _folder(dataset: Dataset, name: str) -> Path:
    return dataset.path / "embeddings" / name


@dataclass(frozen=True)
class Embedded:
    """Unit-norm float32 embeddings of some rows and of all their captions."""

    image: Float[Tensor, "R D"]
    text: Float[Tensor, "C D"]
    owner: Int64[Tensor, " C"]
    """Which image (0 <= owner < R) each caption belongs to."""
    captions: I64
    """[C] number of each caption in the dataset."""


@torch.no_grad()
def embed_images(
    model: CLIP, dataset: Dataset, rows: I64, chunk: int, store: Stored | None = None
) -> Float[Tensor, "R D"]:
    """Image embeddings of some rows, at the tower's evaluation size."""
    device, parts = model.logit_scale.device, []
    if store is not None and store.made_at != model.visual.image_size:
        store = None
    for start in range(0, len(rows), chunk):
        some = rows[start : start + chunk]
        if store is not None:
            features = store.take(some)[0].to(device).float()
            if store.layers is not None:
                features = model.visual.suffix(features, store.layers)
        else:
            images = load_images(dataset, some, model.visual.image_size)
            features = model.visual.features(images.to(device))
        parts.append(F.normalize(model.visual.project(features).float(), dim=-1).cpu())
    return torch.cat(parts)


@torch.no_grad()
def embed_captions(
    model: CLIP, tokens: TokenStore, numbers: I64, chunk: int, store: Stored | None = None
) -> Float[Tensor, "C D"]:
    """Text embeddings of some captions, by their numbers in the dataset."""
    device = model.logit_scale.device
    order = np.argsort(np.diff(tokens.starts)[numbers], kind="stable")  # hardly any padding
    out = torch.empty(len(numbers), model.config.embed_dim)
    if store is not None and store.made_at != model.text.context_length:
        store = None  # of captions that were cut for a stage
    for start in range(0, len(numbers), chunk):
        places = order[start : start + chunk]
        some = numbers[places]
        if store is not None:
            values, counts = store.take(some)
            features = values.to(device).float()
            if store.layers is not None:
                assert counts is not None
                features = model.text.suffix(features, counts, store.layers)
        else:
            ids, lengths = tokens.batch(some, model.text.context_length)
            features = model.text.features(
                torch.from_numpy(ids).to(device), torch.from_numpy(lengths).to(device)
            )
        out[places] = F.normalize(model.text.project(features).float(), dim=-1).cpu()
    return out


def embed_rows(
    model: CLIP,
    dataset: Dataset,
    tokens: TokenStore,
    rows: I64,
    chunk: int,
    stores: Stores = Stores(),
) -> Embedded:
    """Embed rows with all their captions. The model is expected in evaluation mode."""
    starts = dataset.caption_starts
    captions = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in rows.tolist()])
    owner = np.repeat(np.arange(len(rows)), starts[rows + 1] - starts[rows])
    return Embedded(
        image=embed_images(model, dataset, rows, chunk, stores.image),
        text=embed_captions(model, tokens, captions, chunk, stores.text),
        owner=torch.from_numpy(owner),
        captions=captions,
    )
