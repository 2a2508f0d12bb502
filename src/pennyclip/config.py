"""What a run is: frozen dataclasses, read from and written to TOML. Imports no torch.

Reading is strict: an unknown key is an error that names its nearest neighbour.
"""

import dataclasses
import difflib
import tomllib
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pennyclip.errors import RequestError

T = TypeVar("T")
Depth = Literal["all", "none"] | int
Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class ImageTower:
    """A timm model and the head that projects its pooled features into the embedding space."""

    name: str
    """Name of a timm model."""
    image_size: int = 224
    """Side of the square input at evaluation, in pixels; stages may train at others."""
    head: Literal["linear", "mlp", "none"] = "linear"
    """Linear, open_clip's two-layer MLP, or none: pooled features are the embedding (SigLIP)."""
    head_bias: bool = False
    """Whether the head's last layer adds a bias, as EVA-CLIP's does."""
    pool: Literal["token", "avg", "map"] | None = None
    """Class token, mean of the patches, or attention; unset: as the weights say, else timm's."""
    activation: Activation | None = None
    """Of the MLPs; unset: as the weights say, else timm's for this model."""
    weights: str | None = None
    """A file, a folder, `package:NAME` (came inside a Python package) or `hub:org/name`."""
    drop_keys: tuple[str, ...] = ()
    """Keys of the weights file that may be left out; * stands for anything: "head.*"."""
    new_keys: tuple[str, ...] = ()
    """Parameters of the tower that may start from random although weights are loaded."""
    resample: Literal["timm", "eva"] = "timm"
    """How position embeddings and patch kernels change size: see `weights/resample.py`."""
    mean: tuple[float, float, float] | None = None
    """Mean of the input per channel, of 0..1; unset: as the weights say, else timm's."""
    std: tuple[float, float, float] | None = None
    """Its standard deviation per channel, of 0..1; unset: as the weights say, else timm's."""


@dataclass(frozen=True, kw_only=True)
class ClipText:
    """CLIP's own causal transformer over byte-pair tokens (Radford et al. 2021, section 2.4)."""

    kind: Literal["clip"] = "clip"
    family: Literal["clip", "siglip"] = "clip"
    """SigLIP's tower (Zhai et al. 2023) sees both ways and is fed padding up to its full length."""
    width: int = 512
    layers: int = 12
    heads: int = 8
    context_length: int = 77
    """Longest caption in tokens, start and end tokens included."""
    vocab_size: int = 49408
    activation: Activation | None = None
    """Of the MLPs; unset: as the weights say, else gelu."""
    pad_id: int | None = None
    """What SigLIP's captions are filled up with; unset: as the weights say, else 1 (SigLIP's)."""
    tokenizer: str | None = None
    """A folder with tokenizer.json, `package:NAME` or `hub:org/name`; unset: CLIP's own."""
    weights: str | None = None
    """A file, a folder or `hub:org/name` to take this tower from."""
    drop_keys: tuple[str, ...] = ()
    """Keys of the weights file that may be left out; * stands for anything."""
    new_keys: tuple[str, ...] = ()
    """Parameters of the tower that may start from random although weights are loaded."""


@dataclass(frozen=True, kw_only=True)
class TransformersText:
    """A transformers encoder, its pooled output projected into the embedding space."""

    kind: Literal["transformers"] = "transformers"
    name: str
    """A folder with config.json and tokenizer.json, `package:NAME` or `hub:org/name`."""
    pool: Literal["mean", "cls"] = "mean"
    """Mean over the real tokens, or the first token's state."""
    head: Literal["linear", "mlp"] = "linear"
    context_length: int = 77
    pretrained: bool = True
    """Start from the weights that lie in the folder; otherwise from random ones."""
    weights: str | None = None
    """A CLIP's file, folder or `hub:org/name` to take this tower from, instead of the folder's."""
    drop_keys: tuple[str, ...] = ()
    """Keys of the weights file that may be left out; * stands for anything."""
    new_keys: tuple[str, ...] = ()
    """Parameters of the tower that may start from random although weights are loaded."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Two towers and the embedding space that they share."""

    image: ImageTower
    text: ClipText | TransformersText = field(default_factory=ClipText)
    embed_dim: int = 512
    """Width of the shared embedding space."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a run. A run is a list of stages."""

    epochs: float | None = None
    """Length in passes over the training rows; give this or `samples`."""
    samples: int | None = None
    """Length in samples seen."""
    image_size: int | None = None
    """Training image side in pixels; unset: the tower's."""
    text_length: int | None = None
    """Longest caption in tokens; unset: the tower's context length."""
    image_layers: Depth = "all"
    """What learns of the image tower's trunk: all, none, or the last N layer groups."""
    text_layers: Depth = "all"
    """What learns of the text tower's trunk: all, none, or the last N layers."""
    lr_factor: float = 1.0
    """Multiplies every learning rate during this stage."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What is done to a training sample before it is seen, drawn by (seed, epoch, row)."""

    crop_scale: tuple[float, float] = (1.0, 1.0)
    """Range of the area share that a random resized crop keeps; (1, 1): the centre crop."""


@dataclass(frozen=True, kw_only=True)
class PartRates:
    """What one part of the model (a trunk, or the heads) learns with; unset: as the optimizer."""

    lr: float | None = None
    weight_decay: float | None = None
    layer_decay: float = 1.0
    """Rate factor from one layer to the one below it (Clark et al. 2020, ELECTRA)."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer, its rates, and their course over the run."""

    name: str = "adamw"
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.98)
    """CLIP's for ViTs (Radford et al. 2021, table 18)."""
    eps: float = 1e-6
    """CLIP's for ViTs (Radford et al. 2021, table 18)."""
    weight_decay: float = 0.2
    """Not applied to norms, biases, class token, position embeddings and temperature."""
    clip_norm: float = 1.0
    """Largest norm of the true (unscaled) gradient over all parameters."""
    warmup_steps: int | None = None
    """Updates of linear warm-up; unset: `warmup_share` of the run."""
    warmup_share: float = 0.05
    min_lr_share: float = 0.0
    """The rate at the end of the cosine, as a share of the peak."""
    image: PartRates = field(default_factory=PartRates)
    text: PartRates = field(default_factory=PartRates)
    heads: PartRates = field(default_factory=PartRates)


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """When the run is saved, and how many saves are kept."""

    every_steps: int | None = None
    every_minutes: float = 10.0
    keep: int = 2
    """Newest checkpoints kept; the best one by the development split is kept besides."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Retrieval on a held-out split during the run; the best checkpoint is chosen by it."""

    split: str = "dev"
    """Subset of the dataset that chooses; a report's own numbers come from another."""
    every_epochs: float = 1.0
    chunk: int = 32
    """Images or captions encoded at a time. On CPUs, small chunks stay in the cache."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run, apart from where it writes."""

    data: str = ""
    """Folder of the prepared dataset; a recipe leaves it to the command line."""
    subset: str = "train"
    """Which of the dataset's rows are trained on."""
    model: Model
    stages: tuple[Stage, ...]
    batch_size: int = 256
    """Pairs in one contrastive batch; every pair's negatives are the rest of it."""
    seed: int = 0
    precision: Precision = "fp32"
    loss: str = "infonce"
    workers: int = 2
    """Threads that read and decode images; 0: the training thread does it."""
    log_every: int = 10
    """Updates between two lines of metrics."""
    optim: Optim = field(default_factory=Optim)
    augment: Augment = field(default_factory=Augment)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    evaluate: Evaluation = field(default_factory=Evaluation)


RECIPES = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(name: str) -> Config:
    """Read a named recipe, or a TOML file given by its path."""
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if not path.is_file():
        near = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise RequestError(
            f"no recipe '{name}'.{hint} Known recipes: {', '.join(recipe_names())}; "
            "or give the path of a .toml file."
        )
    return read_toml(path)


def read_toml(path: Path) -> Config:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{path} is not valid TOML: {error}") from error
    return from_tree(Config, tree, str(path))


def from_tree(kind: type[T], tree: Any, where: str) -> T:
    """Build a dataclass from nested dictionaries, refusing what it does not know.

    Raises:
        RequestError: an unknown key (its nearest neighbour is named), a missing key or a value
            of another type.
    """
    if not isinstance(tree, dict):
        raise RequestError(f"{where}: expected a table, found {tree!r}")
    hints = get_type_hints(kind)
    for key in tree:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" Known keys: {', '.join(hints)}."
            raise RequestError(f"{where}: unknown key '{key}'.{hint}")
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in tree.items()}
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        required = (
            item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        )
        if required and item.name not in values:
            raise RequestError(f"{where}: the key '{item.name}' is missing")
    return kind(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_tree(hint, value, where)
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, where)
    if origin is Literal:
        if value in args and type(value) in {type(arg) for arg in args}:
            return value
        raise RequestError(
            f"{where}: expected one of {', '.join(map(repr, args))}, found {value!r}"
        )
    if origin is tuple and isinstance(value, list | tuple):
        inner = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(inner) != len(value):
            raise RequestError(f"{where}: expected {len(inner)} values, found {value!r}")
        return tuple(
            _convert(kind, item, f"{where}[{i}]")
            for i, (kind, item) in enumerate(zip(inner, value, strict=True))
        )
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and type(value) is hint:
        return value
    raise RequestError(f"{where}: expected {getattr(hint, '__name__', hint)}, found {value!r}")


def _convert_union(args: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    kinds = [arg for arg in args if dataclasses.is_dataclass(arg)]
    if kinds and isinstance(value, dict):  # told apart by their literal `kind`
        by_name = {get_args(get_type_hints(kind)["kind"])[0]: kind for kind in kinds}
        name = value.get("kind", next(iter(by_name)))
        if name not in by_name:
            raise RequestError(f"{where}: kind must be one of {', '.join(by_name)}, found {name!r}")
        return from_tree(by_name[name], value, where)
    for arg in args:
        if arg is not type(None):
            try:
                return _convert(arg, value, where)
            except RequestError:
                continue
    wanted = " or ".join(str(getattr(a, "__name__", a)) for a in args if a is not type(None))
    raise RequestError(f"{where}: expected {wanted}, found {value!r}")


def to_tree(config: Any) -> dict[str, Any]:
    """The nested dictionaries that `from_tree` reads; unset (None) values are left out."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return {key: item for key, item in items.items() if item is not None}
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    return plain(config)


def to_toml(config: Config) -> str:
    """The configuration as TOML text that `read_toml` reads back equal."""
    lines: list[str] = []

    def literal(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str):
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'
        if isinstance(value, list):
            return f"[{', '.join(map(literal, value))}]"
        return repr(value)

    def table(name: str, tree: dict[str, Any], header: str) -> None:
        if name:
            lines.extend(["", header])
        nested = {k: v for k, v in tree.items() if isinstance(v, dict) or _is_tables(v)}
        lines.extend(f"{k} = {literal(v)}" for k, v in tree.items() if k not in nested)
        for key, value in nested.items():
            path = f"{name}.{key}".lstrip(".")
            if isinstance(value, dict):
                table(path, value, f"[{path}]")
            else:
                for item in value:
                    table(path, item, f"[[{path}]]")

    table("", to_tree(config), "")
    return "\n".join(lines) + "\n"


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)
