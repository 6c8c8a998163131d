"""Ends this process cleanly: at a signal, or when its parent process is gone."""

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
    """Leave the `with` block at Ctrl-C, SIGTERM or SIGHUP, by an exception that is raised inside the block.

    While the block cleans up, only Ctrl-C still interrupts it. If `nohup` started the program, SIGHUP stays ignored.

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
    """Inside the `with` block, exit this process as soon as its parent process is gone.

    If the server is killed, Flower interrupts the app. Training would treat this as Ctrl-C and stop after the round.
    But no round ends without a server, and Flower retries for ever. The app would keep the lock of the run folder, and
    the next server could not resume the run. An immediate exit loses nothing: checkpoints are written atomically.

    Args:
        report: function that gets the reason before the exit.
    """
    parent, left = os.getppid(), threading.Event()

    def watch() -> None:
        while not left.wait(_POLL_SECONDS):
            if os.getppid() != parent:
                try:
                    report("the server that started this run is gone, so the run ends; start it again to resume it")
                finally:  # `report` fails if its terminal is gone, too
                    os._exit(1)  # ends the main thread, too, which may wait for the server inside Flower

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        left.set()
