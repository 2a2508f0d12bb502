"""A recipe's keys as options of the command line: what tyro leaves to us. Imports no torch.

An option that a recipe has not is refused with the nearest key, or with all of its section. A list
of tables is one value, written as in a recipe: --optim.patterns '[{match = "text.*", lr = 1e-5}]'.
"""

import dataclasses
import tomllib
from collections.abc import Collection, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from pennyclip.config import Config
from pennyclip.config_file import from_tree, to_tree
from pennyclip.errors import RequestError, did_you_mean


def read_tables(config: Config, arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """Set the lists of tables that arguments give.

    Returns:
        The changed recipe, and the arguments that are left.

    Raises:
        RequestError: a value is no such list.
    """
    left, items = [], iter(arguments)
    for item in items:
        name, equals, value = item.partition("=")
        kind = _table_kind(_path(name)) if name.startswith("--") else None
        if kind is None:
            left.append(item)
            continue
        tables = _toml(name, value if equals else next(items, ""), kind)
        config = _with(config, _path(name), tables, name)
    return config, left


def check_options(config: Config, own: Collection[str], arguments: Sequence[str]) -> None:
    """Refuse an option that neither the recipe nor the command has.

    Args:
        config: the recipe, whose towers and stages say which keys there are.
        own: names of the command's own options.
        arguments: what comes behind the recipe's name.

    Raises:
        RequestError: it names the nearest key, or all of that section.
    """
    for item in arguments:
        name = item.partition("=")[0]
        if name.startswith("--") and not name.startswith("--tyro-"):
            _check(config, own, name)


def _check(config: Config, own: Collection[str], name: str) -> None:
    known = vars(config) | dict.fromkeys(own, False)
    for key in _path(name):
        switched_off = key.startswith("no_") and isinstance(known.get(key[3:]), bool)
        if key not in known and not switched_off:
            hint = did_you_mean(key, known) or f" Known keys: {', '.join(known) or 'none'}."
            raise RequestError(f"no option {name}: unknown key '{key}'.{hint}")
        value = known.get(key)
        if isinstance(value, tuple):
            known = {str(number): item for number, item in enumerate(value)}
        else:
            known = dict(vars(value)) if dataclasses.is_dataclass(value) else {}


def _path(name: str) -> list[str]:
    """--optim.warmup-steps -> optim, warmup_steps."""
    return name.removeprefix("--").replace("-", "_").split(".")


def _table_kind(path: list[str]) -> type | None:
    """What a key's tables are, where it is a list of tables."""
    kind: Any = Config
    for key in path:
        kind = get_type_hints(kind).get(key) if dataclasses.is_dataclass(kind) else None
    tables = get_origin(kind) is tuple and dataclasses.is_dataclass(get_args(kind)[0])
    return get_args(kind)[0] if tables else None


def _toml(name: str, text: str, kind: type) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        first, *_ = keys = [field.name for field in dataclasses.fields(kind)]
        raise RequestError(
            f"{name}: expected a list of tables as TOML, such as '[{{{first} = ...}}]', with the "
            f"keys {', '.join(keys)}; found {text!r} ({error})"
        ) from error


def _with(config: Config, path: list[str], tables: Any, where: str) -> Config:
    tree = to_tree(config)
    section = tree
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = tables
    return from_tree(Config, tree, where)
