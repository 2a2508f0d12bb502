"""What a command answers: for people, for programs, and with which exit code."""

from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import arg

Json = Annotated[bool, arg(help="Print one JSON object on standard output, nothing else there.")]


@dataclass(frozen=True)
class Answer:
    """What a command found."""

    text: str
    tree: dict[str, Any]
    exit_code: int = 0
