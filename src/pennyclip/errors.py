"""The two ways in which a command can end badly.

Every message says what was expected, what was found, where, and what to do.
"""


class RequestError(ValueError):
    """The request was wrong: a bad argument, configuration or input. The command exits with 2."""


class RunError(RuntimeError):
    """The request was fine, and carrying it out failed. The command exits with 1."""
