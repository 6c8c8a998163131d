"""Ends a process in good order: at a signal, or when its parent process is gone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 1.0


@contextmanager
def exit_on_signals() -> Iterator[list[int]]:
    """Leave the block at Ctrl-C, SIGTERM or SIGHUP, by an exception inside it.

    While the block cleans up, only Ctrl-C still interrupts it. SIGHUP stays ignored in a program started by `nohup`.

    Yields:
        The list of received signals, empty at first.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        if not received:
            received.append(number)
            raise KeyboardInterrupt

    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield received
    except KeyboardInterrupt as error:
        if not received:  # Ctrl-C, or a signal that training handled
            received.append(int(getattr(error, "signal", signal.SIGINT)))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exit_with_parent(report: Callable[[str], None]) -> Iterator[None]:
    """Exit this process, inside the block, as soon as its parent process is gone.

    Flower interrupts an app when its server was killed. Training would treat this as Ctrl-C and stop after the round.
    But no round ends without a server, and Flower retries for ever. The app would keep the lock of the run folder, and
    the next server could not resume the run. Exiting at once loses nothing: checkpoints are written atomically.

    Args:
        report: gets the reason before the exit.
    """
    parent, left = os.getppid(), threading.Event()

    def watch() -> None:
        while not left.wait(_POLL_SECONDS):
            if os.getppid() != parent:
                try:
                    report("the server that started this run is gone, so the run ends; start it again to resume it")
                finally:  # the reader of the report may be gone, too
                    os._exit(1)  # the main thread may wait for the server inside Flower

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        left.set()
