"""Ctrl-C, SIGTERM and the end of the terminal: all of them end a block in good order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_signals() -> Iterator[list[int]]:
    """Leave the block, by an exception inside it, at Ctrl-C, SIGTERM or the end of the terminal.

    Further ones are ignored while the block cleans up, but for Ctrl-C. Who starts a program with `nohup` wants it to
    survive the terminal, and it does.

    Yields:
        The signals that came; empty as long as there is none.
    """
    came: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        del frame
        if not came:
            came.append(number)
            raise KeyboardInterrupt

    caught = [number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in caught}
    try:
        yield came
    except KeyboardInterrupt as error:
        if not came:  # Ctrl-C, or a signal that training took in
            came.append(int(getattr(error, "signal", signal.SIGINT)))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
