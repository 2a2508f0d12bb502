"""What a command answers: for people, for programs, and with which exit code."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import arg

from pennyclip.base.progress import discard

UNREAD = 128 + 13
"""Exit code where nobody reads standard output any more: a shell's, of one that SIGPIPE ended."""
Json = Annotated[bool, arg(help="Print one JSON object on standard output, nothing else there.")]


@dataclass(frozen=True)
class Answer:
    """What a command found."""

    text: str
    tree: dict[str, Any]
    exit_code: int = 0


@contextmanager
def until_unread() -> Iterator[None]:
    """Around what prints: ends quietly where the reader has gone, as in `pennyclip list | head -1`.

    Raises:
        SystemExit: with `UNREAD`.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it is closed from the start: pennyclip list >&-
                sys.stdout.flush()  # here, since nothing can be caught when Python ends
    except BrokenPipeError:
        discard(sys.stdout)
        raise SystemExit(UNREAD) from None
