"""A recipe's keys as options of the command line: what tyro leaves to us. Imports no torch.

An option that a recipe has not is refused with the nearest key, or with all of its section, and a
word that is none of a key's values with the nearest of these. A list of tables is one value, as in
a recipe: --optim.patterns '[{match = "text.*", lr = 1e-5}]'.
"""

import dataclasses
import tomllib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pennyclip.base.errors import RequestError, did_you_mean
from pennyclip.config.file import from_tree, recipe_names, to_tree
from pennyclip.config.keys import Config

RESUME = (
    "To go on with one that was stopped: pennyclip train --resume RUN; with --cooldown, a 'wsd' "
    "schedule begins its cooldown there."
)
SYNONYMS = {"learning_rate": "lr", "wd": "weight_decay", "bs": "batch_size"}
"""Other tools' names of keys."""


def recipe_usage(command: str) -> str:
    """How a command that takes a recipe is called, and the recipes."""
    out = " --out RUN" if command == "train" else ""
    lines = [f"usage: pennyclip {command} RECIPE --data DATASET{out} [--section.key value ...]"]
    if command == "train":
        lines += ["       pennyclip train --resume RUN [--cooldown]", "", RESUME]
    lines += ["", "RECIPE is the path of a .toml file, or one of (pennyclip list recipes):"]
    lines += [f"  {name}" for name in recipe_names()]
    lines += ["", f"All keys of one: pennyclip {command} RECIPE --help"]
    return "\n".join(lines)


def check_resume(arguments: Sequence[str]) -> None:
    """Refuse keys beside --resume.

    Raises:
        RequestError: it says how to begin anew from the run.
    """
    own = ("resume", "cooldown", "no_cooldown", "json", "no_json", "help")
    options = [item for item in arguments if item.startswith("--")]
    keys = [o for o in options if ".".join(_path(o.partition("=")[0])) not in own]
    if keys:
        raise RequestError(
            f"{keys[0]}: --resume goes on with the run as it is and takes no keys of a recipe. To "
            "begin anew from its best checkpoint: pennyclip train RUN/config.toml --init RUN "
            f"--out NEW {keys[0]} ..."
        )


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
    for item, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        name, equals, value = item.partition("=")
        if name.startswith("--") and not name.startswith("--tyro-"):
            _check(config, own, name)
            _check_choice(name, value if equals else following)


def _check(config: Config, own: Collection[str], name: str) -> None:
    known = vars(config) | dict.fromkeys(own, False)
    for key in _path(name):
        switched_off = key.startswith("no_") and isinstance(known.get(key[3:]), bool)
        if key not in known and not switched_off:
            near = _same_key(config, name) if key == _path(name)[-1] else ""
            near = near or did_you_mean(key, known)
            hint = near or f" Known keys: {', '.join(known) or 'none'}."
            raise RequestError(f"no option {name}: unknown key '{key}'.{hint}")
        value = known.get(key)
        if isinstance(value, tuple):
            known = {str(number): item for number, item in enumerate(value)}
        else:
            known = dict(vars(value)) if dataclasses.is_dataclass(value) else {}


def _check_choice(name: str, value: str) -> None:
    """Refuse a value that is none of a key's, where these are words."""
    hint = _hint(_path(name))
    known = get_args(hint) if get_origin(hint) is Literal else ()
    if known and value not in known and not value.startswith("--"):
        raise RequestError(
            f"{name}: expected one of {', '.join(known)}; found {value!r}."
            f"{did_you_mean(value, known)}"
        )


def _same_key(config: Config, name: str) -> str:
    """The end of a message: where in the recipe the option's last key is."""
    *section, key = _path(name)
    found = [path for path in _paths(config) if path[-1] == SYNONYMS.get(key, key)]
    near = min(found, key=lambda path: (path[: len(section)] != section, len(path)), default=None)
    return f" Did you mean '--{'.'.join(near).replace('_', '-')}'?" if near else ""


def _paths(value: Any) -> Iterator[list[str]]:
    """Every key of a recipe, tables and what is in them."""
    if isinstance(value, tuple):
        children = {str(number): item for number, item in enumerate(value)}
    else:
        children = dict(vars(value)) if dataclasses.is_dataclass(value) else {}
    for key, child in children.items():
        if not key.isdecimal():
            yield [key]
        yield from ([key, *path] for path in _paths(child))


def _path(name: str) -> list[str]:
    """--optim.warmup-steps -> optim, warmup_steps."""
    return name.removeprefix("--").replace("-", "_").split(".")


def _hint(path: list[str]) -> Any:
    """What a key's value is; None where a table could be one of several."""
    kind: Any = Config
    for key in path:
        kind = get_type_hints(kind).get(key) if dataclasses.is_dataclass(kind) else None
    return kind


def _table_kind(path: list[str]) -> type | None:
    """What a key's tables are, where it is a list of tables."""
    kind = _hint(path)
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
