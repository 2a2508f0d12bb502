"""The two ways in which a command can end badly.

Every message says what was expected, what was found, where, and what to do.
"""

import difflib
from collections.abc import Iterable


class RequestError(ValueError):
    """The request was wrong: a bad argument, configuration or input. The command exits with 2."""


class RunError(RuntimeError):
    """The request was fine, and carrying it out failed. The command exits with 1."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that is nearest, if any is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def some_like(pattern: str, names: list[str]) -> str:
    """For a message about a pattern that matches nothing: three names like it, or the first."""
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
    return ", ".join(near or names[:3])
