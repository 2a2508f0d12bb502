"""Weights on disk: one file or a folder, in whatever container their authors chose."""

import json
import pickle
import re
import warnings
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.weights.dual_encoder import fold_poolers

# What a folder's weights are called, the safest container first. An index lists shards.
NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "open_clip_pytorch_model.bin",
)
WRAPPERS = ("state_dict", "model_ema", "model", "module")
PREFIXES = ("module.", "_orig_mod.")  # left by DistributedDataParallel and torch.compile


@dataclass(frozen=True)
class WeightsFile:
    """The tensors of a weights file, and where files that describe them may lie."""

    name: str
    """For reports: the file, with its folder where that names the model."""
    path: Path
    folder: Path | None
    """The folder that describes the weights; None: a file that may lie among unrelated others."""
    state: dict[str, Tensor]
    folded: dict[str, str] = field(default_factory=dict)
    """Keys of the file whose tensors went into others on reading -> why."""

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object that lies beside the weights; empty where there is none.

        Raises:
            RequestError: it is there, and is not JSON.
        """
        if self.folder is None or not (self.folder / name).is_file():
            return {}
        return read_json(self.folder / name)


def read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RequestError(f"{path} is not valid JSON: {error}") from error
    return tree if isinstance(tree, dict) else {}


def read_weights(path: Path) -> WeightsFile:
    """Read a file, or the weights that lie in a folder.

    Raises:
        RequestError: there are none, a shard is missing, or the file cannot be read.
    """
    if path.is_file():
        name, found = path.name, path
        folder = path.parent if path.name in NAMES else None
    else:
        folder = path
        found = next((path / name for name in NAMES if (path / name).is_file()), path)
        if found == path:
            held = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise RequestError(
                f"the folder {path} holds no weights: expected one of {', '.join(NAMES)}, found "
                f"{held}. Of a run's folder, give one of its checkpoints/step_*."
            )
        name = f"{path.name}/{found.name}"
    file = WeightsFile(name, found, folder, read_state(found))
    state, folded = fold_poolers(file.state, file.json("config.json"))
    return replace(file, state=state, folded=folded)


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file, or of the shards that an index names.

    Raises:
        RequestError: a file is missing, empty, or holds something else.
    """
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    if not path.is_file():
        raise RequestError(f"no weights at {path.absolute()}")
    if path.stat().st_size == 0:
        raise RequestError(f"{path} is empty (0 bytes). Download or copy it again.")
    try:
        if path.suffix == ".safetensors":
            loaded: Any = load_file(path)
        elif _is_torchscript(path):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.jit is deprecated; OpenAI's files stay
                loaded = dict(torch.jit.load(path, map_location="cpu").state_dict())  # type: ignore[no-untyped-call]
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Whatever else torch says is about switching the protection off.
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise RequestError(
                f"{path} holds a pickled object of class {found[1]}; expected a file that holds "
                "tensors only, since other objects can run code on loading. Where you trust the "
                "file, save its state_dict alone with torch.save, or convert it to safetensors."
            ) from error
        raise RequestError(
            f"{path} cannot be read as weights: its pickle is damaged or no PyTorch file. Expected "
            "safetensors, a PyTorch file that holds tensors only, or a TorchScript archive."
        ) from error
    except Exception as error:
        raise RequestError(
            f"{path} cannot be read as weights ({type(error).__name__}: {error}). Expected "
            "safetensors, a PyTorch file that holds tensors only, or a TorchScript archive."
        ) from error
    state = {key: value for key, value in _unwrap(loaded).items() if isinstance(value, Tensor)}
    if not state:
        raise RequestError(f"{path} holds no tensors: expected a model's state dict")
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _unwrap(loaded: Any) -> dict[str, Any]:
    """The state dict inside a training checkpoint; EVA's files nest two wrappers."""
    while isinstance(loaded, dict):
        inner = next((loaded[w] for w in WRAPPERS if isinstance(loaded.get(w), dict)), None)
        if inner is None:
            return loaded
        loaded = inner
    return {}


def _read_shards(index: Path) -> dict[str, Tensor]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise RequestError(
            f"{index}: expected weight_map to map each key to its shard's file name, found "
            f"{str(places)[:80]}. Download or copy it again."
        )
    state: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        if not (index.parent / shard).is_file():
            raise RequestError(f"{index} names the shard {shard}, which does not lie beside it")
        state |= read_state(index.parent / shard)
    missing = sorted(set(places) - set(state))
    if missing or not state:
        raise RequestError(
            f"{index} names {len(places)} keys, and its shards lack {len(missing)} of them: "
            f"{', '.join(missing[:8])}"
        )
    return state


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())
