"""A process that must not outlive the one that started it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WATCH_SECONDS = 1.0


@contextmanager
def ends_with_its_parent(say: Callable[[str], None]) -> Iterator[None]:
    """End this process, inside the block, as soon as the process that started it is gone.

    Flower interrupts an app whose server was killed. Training takes that for Ctrl-C and would stop after the round;
    but without a server no round ends, and Flower tries to reach it for ever. The run's folder would be held for as
    long, and the server's successor could not go on with it. Checkpoints are written whole or not at all, so that
    nothing is lost by ending at once.

    Args:
        say: is told why, before the end.
    """
    parent, over = os.getppid(), threading.Event()

    def watch() -> None:
        while not over.wait(_WATCH_SECONDS):
            if os.getppid() != parent:
                try:
                    say("the server that started this run is gone, so the run ends; start it again, and it goes on")
                finally:  # there may be nobody left to say it to
                    os._exit(1)  # the main thread may be inside Flower, waiting for the server

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
