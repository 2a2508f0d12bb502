"""What frozen layers make of a whole dataset: float16 on disk, one entry a row or a caption.

dataset/embeddings/<fingerprint>/features.npy    captions' states one after the other
"""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Float16, Int64
from torch import Tensor

from pennyclip.base.atomic import replacing
from pennyclip.base.errors import RunError
from pennyclip.data.order import I64
from pennyclip.data.text import padded_length

Array = npt.NDArray[np.float16]

FREE_SHARE = 0.5
"""Most of the free disk that one store may take. chosen: as much again stays for checkpoints."""


class NotStored(RunError):
    """Why values cannot be kept in float16 on this disk."""


@dataclass(frozen=True)
class States:
    """What the first layers of a trunk have made of B inputs: where its other layers go on."""

    values: Float[Tensor, "B ..."]
    layers: int
    """How many of the tower's `layers()`."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "States":
        return States(self.values.to(device, non_blocking=non_blocking), self.layers)

    def pin_memory(self) -> "States":
        return States(self.values.pin_memory(), self.layers)

    def __getitem__(self, at: slice) -> "States":
        return States(self.values[at], self.layers)


@dataclass(frozen=True)
class Stored:
    """What frozen layers have made of a whole dataset, memory-mapped."""

    values: Array
    """[N, ...], an entry an image or caption; with `starts` [T, W], an entry a token."""
    layers: int | None
    """How many of the tower's `layers()`; None: the whole trunk, these are its features."""
    made_at: int
    """Image size in pixels, or longest caption in tokens, at which they were computed."""
    starts: I64 | None = None
    """[N + 1] where the tokens of each caption begin; None: entries have no length."""

    def take(self, numbers: I64) -> tuple[Float16[Tensor, "B ..."], Int64[Tensor, " B"] | None]:
        """Entries of some images or captions; where an entry is a token, also how many each has.

        Captions are padded with zeros to the longest, rounded up to 8 as the loader's tokens are.
        """
        if self.starts is None:
            return torch.from_numpy(self.values[numbers]), None
        begin = self.starts[numbers]
        lengths = self.starts[numbers + 1] - begin
        columns = np.arange(padded_length(int(lengths.max(initial=0)), self.made_at))
        inside = columns < lengths[:, None]
        values = np.zeros((*inside.shape, self.values.shape[1]), np.float16)
        values[inside] = self.values[(begin[:, None] + columns)[inside]]
        return torch.from_numpy(values), torch.from_numpy(lengths)


def find(folder: Path) -> Array | None:
    """A store that was made before, memory-mapped; None where there is none."""
    path = _file(folder)
    return np.load(path, mmap_mode="r") if path.is_file() else None


def create(folder: Path, count: int, parts: Iterable[tuple[I64, Tensor]]) -> Array:
    """Write a store.

    Args:
        folder: its own.
        count: entries in it.
        parts: places of some entries, and their values, until every place was given once.

    Raises:
        NotStored: it would take too much of the free disk, or a value is not finite in float16.
            Nothing was written.
    """
    try:
        with replacing(_file(folder)) as partial:
            _write(partial, count, parts)
    except NotStored:
        with suppress(OSError):  # another process writes there too
            folder.rmdir()
        raise
    stored = find(folder)
    assert stored is not None
    return stored


def _write(path: Path, count: int, parts: Iterable[tuple[I64, Tensor]]) -> None:
    out: np.memmap[Any, np.dtype[np.float16]] | None = None
    for places, part in parts:
        values: Float16[Tensor, "P ..."] = part.to(torch.float16).cpu()
        if not torch.isfinite(values).all():
            raise NotStored(
                f"some of the values at {places[:3].tolist()}... are not finite, or too large for "
                f"float16 (65,504): the largest is {part.abs().max().item():.3g}"
            )
        if out is None:
            out = _reserve(path, (count, *values.shape[1:]))
        out[places] = values.numpy()
    assert out is not None, "a dataset has at least one row"
    out.flush()


def _reserve(path: Path, shape: tuple[int, ...]) -> "np.memmap[Any, np.dtype[np.float16]]":
    """An array on disk whose space is taken at once: a full disk would end the process later."""
    size = 2 * int(np.prod(shape))
    free = shutil.disk_usage(path.parent).free
    if size > FREE_SHARE * free:
        raise NotStored(
            f"they would take {size / 1e9:.3g} GB, more than {FREE_SHARE:.0%} of the "
            f"{free / 1e9:.3g} GB that are free in {path.parent}"
        )
    out = np.lib.format.open_memmap(path, "w+", np.float16, shape)
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            raise NotStored(f"the disk refuses {size / 1e9:.3g} GB: {error}") from error
    return out


def _file(folder: Path) -> Path:
    return folder / "features.npy"
