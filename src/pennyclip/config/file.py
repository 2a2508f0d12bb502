"""Configurations as TOML: read strictly, and written so that they read back equal.

An unknown key is an error that names its nearest neighbour. Imports no torch.
"""

import dataclasses
import tomllib
import types
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pennyclip.base.errors import RequestError, did_you_mean
from pennyclip.config.keys import Config

T = TypeVar("T")

RECIPES = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(name: str) -> Config:
    """Read a named recipe, or a TOML file given by its path."""
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if not path.is_file():
        raise RequestError(
            f"no recipe '{name}'.{did_you_mean(name, recipe_names())} Known recipes: "
            f"{', '.join(recipe_names())}; or give the path of a .toml file."
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
            hint = did_you_mean(key, hints) or f" Known keys: {', '.join(hints)}."
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
    if dataclasses.is_dataclass(hint):
        return from_tree(cast(Any, hint), value, where)
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, where)
    if origin is Literal:
        if value in args and type(value) in {type(arg) for arg in args}:
            return value
        raise RequestError(
            f"{where}: expected one of {', '.join(map(repr, args))}, found {value!r}."
            f"{did_you_mean(str(value), map(str, args))}"
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
    kinds: list[Any] = [arg for arg in args if dataclasses.is_dataclass(arg)]
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
