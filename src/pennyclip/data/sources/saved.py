"""A folder that Hugging Face's `datasets` saved to disk: a Dataset, or a DatasetDict of splits."""

import json
from pathlib import Path
from typing import Any

from pennyclip.base.errors import RequestError
from pennyclip.data.sources.columns import list_columns
from pennyclip.data.sources.pairs import SPLITS, Options, Reader, Source


def open_saved(path: Path, options: Options) -> Source | None:
    """A Dataset's folder has a state.json that names its arrow files, and its split; a
    DatasetDict's has a dataset_dict.json that names its splits, each a Dataset's folder.

    Raises:
        RequestError: a file is missing or something else, or a split has a name of its own.
    """
    if (path / "dataset_dict.json").is_file():
        names = [str(name) for name in _read(path / "dataset_dict.json").get("splits") or []]
        odd = [name for name in names if name.lower() not in SPLITS]
        if odd or not names:
            raise RequestError(
                f"{path}: the splits are called {', '.join(names) or 'nothing'}; expected are "
                f"{', '.join(SPLITS)}. Give the folders of those you want as sources of their own: "
                f"{path / (odd or ['train'])[0]}."
            )
        parts: list[tuple[Path, str | None]] = [(path / n, SPLITS[n.lower()]) for n in names]
    elif (path / "state.json").is_file():
        parts = [(path, SPLITS.get(str(_read(path / "state.json").get("_split")).lower()))]
    else:
        return None
    files: list[Path] = []
    splits: list[str | None] = []
    for folder, split in parts:
        state = _read(folder / "state.json")
        try:
            named = [folder / one["filename"] for one in state["_data_files"]]
        except (KeyError, TypeError):
            raise RequestError(
                f"{folder / 'state.json'}: expected '_data_files' with a 'filename' each, as "
                "`datasets` writes it. Save the dataset again."
            ) from None
        files += named
        splits += [split] * len(named)
    if not files:
        raise RequestError(f"{path}: its state.json names no data files. Save the dataset again.")
    absent = next((file for file in files if not file.is_file()), None)
    if absent is not None:
        raise RequestError(
            f"{path}: its state.json names {absent}, which is not there. Bring it back, or save "
            "the dataset again."
        )
    return list_columns("datasets", path, files, splits, options)


def _read(file: Path) -> Any:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{file} cannot be read as JSON: {error}. Save the dataset again."
        ) from None
    if not isinstance(tree, dict):
        raise RequestError(f"{file}: expected one JSON object, as `datasets` writes it.")
    return tree


SAVED = Reader(
    "a folder saved by Hugging Face's datasets (state.json or dataset_dict.json)",
    ("image_key", "caption_key"),
    open_saved,
)
