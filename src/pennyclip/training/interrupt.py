"""A stop that is asked for, and carried out between two updates."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """Raised where work was broken off at once, because nothing is lost by it."""


class Interrupt:
    """What was asked for: None, or the signal's number."""

    signal: int | None = None

    @property
    def name(self) -> str:
        return "" if self.signal is None else signal.Signals(self.signal).name

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM, as shells have it."""
        return 0 if self.signal is None else 128 + self.signal

    def check(self) -> None:
        """Break off if a stop was asked for.

        Raises:
            Interrupted: it was.
        """
        if self.signal is not None:
            raise Interrupted(self.name)


@contextmanager
def listening() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C and SIGTERM into a request; a second Ctrl-C stops at once."""
    asked = Interrupt()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
