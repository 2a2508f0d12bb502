"""Embeddings of whole row sets, and the frozen trunks' features computed once.

    dataset/embeddings/<fingerprint>/features.npy    float16, one line a row or caption

The fingerprint covers the trunk's weights and everything that decides its input, so that a cache
is found again by any run with the same frozen trunk, and by no other.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from pennyclip.atomic import replacing
from pennyclip.config import ClipText, ImageTower, TransformersText
from pennyclip.data.index import Dataset
from pennyclip.data.loader import PREPROCESSING, load_images
from pennyclip.data.order import I64
from pennyclip.data.tokens import TokenStore
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import trunk_state

Store = npt.NDArray[np.float16]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class Stores:
    """Stored trunk features of a dataset; None where a trunk is learning."""

    image: Store | None = None
    text: Store | None = None


def fingerprint(state: Mapping[str, Tensor], *inputs: object) -> str:
    """Identifies what weights compute from given inputs."""
    digest = hashlib.blake2b(repr(inputs).encode(), digest_size=12)
    for name, value in state.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _computation(config: ImageTower | ClipText | TransformersText) -> dict[str, Any]:
    """What of a tower's configuration its output depends on, beside its weights."""
    beside = {"weights", "pretrained", "drop_keys", "new_keys", "head", "head_bias", "image_size"}
    return {key: value for key, value in vars(config).items() if key not in beside}


def image_features(
    model: CLIP, dataset: Dataset, size: int, chunk: int, progress: Progress
) -> Store:
    """[rows, V] the frozen image trunk's features of every row, from the cache or computed."""
    tower = model.visual

    def compute() -> Iterator[tuple[I64, Tensor]]:
        for start in range(0, len(dataset), chunk):
            rows = np.arange(start, min(start + chunk, len(dataset)))
            images = load_images(dataset, rows, size)
            yield rows, tower.features(images.to(tower.mean.device))
            progress("image features", int(rows[-1]) + 1, len(dataset))

    return _stored(dataset, _image_trunk(model, dataset, size), len(dataset), compute)


def _image_trunk(model: CLIP, dataset: Dataset, size: int) -> str:
    tower = model.visual
    inputs = (dataset.fingerprint, PREPROCESSING, size, _computation(tower.config))
    return fingerprint(trunk_state(tower), *inputs)


def image_embeddings(model: CLIP, dataset: Dataset, chunk: int, progress: Progress) -> Store:
    """[rows, D] the image tower's unit-norm embeddings of every row, cached likewise."""
    store = _find(dataset, _image_trunk(model, dataset, model.visual.image_size))

    def compute() -> Iterator[tuple[I64, Tensor]]:
        for start in range(0, len(dataset), chunk):
            rows = np.arange(start, min(start + chunk, len(dataset)))
            yield rows, embed_images(model, dataset, rows, chunk, store)
            progress("image embeddings", int(rows[-1]) + 1, len(dataset))

    tower = model.visual
    inputs = (dataset.fingerprint, PREPROCESSING, tower.image_size, _computation(tower.config))
    name = fingerprint(tower.state_dict(), *inputs)
    return _stored(dataset, name, len(dataset), compute)


def text_features(
    model: CLIP, dataset: Dataset, tokens: TokenStore, length: int, chunk: int, progress: Progress
) -> Store:
    """[captions, W] the frozen text trunk's features of every caption, cached likewise."""
    tower = model.text
    total = int(dataset.caption_starts[-1])
    inputs = (dataset.fingerprint, tokens.fingerprint, length, _computation(model.config.text))
    name = fingerprint(trunk_state(tower), *inputs)
    device = model.logit_scale.device

    # Captions of like length together: hardly any padding.
    order = np.argsort(np.diff(tokens.starts), kind="stable")

    def compute() -> Iterator[tuple[I64, Tensor]]:
        for start in range(0, total, chunk):
            numbers = order[start : start + chunk]
            ids, lengths = tokens.batch(numbers, length)
            yield (
                numbers,
                tower.features(
                    torch.from_numpy(ids).to(device), torch.from_numpy(lengths).to(device)
                ),
            )
            progress("text features", start + len(numbers), total)

    return _stored(dataset, name, total, compute)


@torch.no_grad()
def _stored(
    dataset: Dataset, name: str, count: int, compute: Callable[[], Iterator[tuple[I64, Tensor]]]
) -> Store:
    store = _find(dataset, name)
    if store is None:
        final = _path(dataset, name)
        with replacing(final) as partial:
            out: np.memmap[Any, np.dtype[np.float16]] | None = None
            for places, part in compute():
                values = part.float().cpu().numpy()
                if out is None:
                    shape = (count, values.shape[1])
                    out = np.lib.format.open_memmap(partial, "w+", np.float16, shape)
                out[places] = values
            assert out is not None, "a dataset has at least one row"
            out.flush()
        store = np.load(final, mmap_mode="r")
    return store


def _path(dataset: Dataset, name: str) -> Path:
    return dataset.path / "embeddings" / name / "features.npy"


def _find(dataset: Dataset, name: str) -> Store | None:
    path = _path(dataset, name)
    return np.load(path, mmap_mode="r") if path.is_file() else None


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
    model: CLIP, dataset: Dataset, rows: I64, chunk: int, store: Store | None = None
) -> Float[Tensor, "R D"]:
    """Image embeddings of some rows, at the tower's evaluation size."""
    device, parts = model.logit_scale.device, []
    for start in range(0, len(rows), chunk):
        some = rows[start : start + chunk]
        if store is not None:
            features = torch.from_numpy(store[some].astype(np.float32)).to(device)
        else:
            images = load_images(dataset, some, model.visual.image_size)
            features = model.visual.features(images.to(device))
        parts.append(F.normalize(model.visual.project(features).float(), dim=-1).cpu())
    return torch.cat(parts)


@torch.no_grad()
def embed_captions(
    model: CLIP, tokens: TokenStore, numbers: I64, chunk: int, store: Store | None = None
) -> Float[Tensor, "C D"]:
    """Text embeddings of some captions, by their numbers in the dataset."""
    device = model.logit_scale.device
    order = np.argsort(np.diff(tokens.starts)[numbers], kind="stable")  # hardly any padding
    out = torch.empty(len(numbers), model.config.embed_dim)
    for start in range(0, len(numbers), chunk):
        places = order[start : start + chunk]
        some = numbers[places]
        if store is not None:
            features = torch.from_numpy(store[some].astype(np.float32)).to(device)
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
