"""Ctrl-C, SIGTERM and the end of the terminal: a run notes them and stops when it can."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = "stopping after the rounds that are under way; Ctrl-C again ends at once"
TIME_IS_UP = 14  # what stands for a signal where a run was given only so many seconds: the number of SIGALRM
HANGUP = getattr(signal, "SIGHUP", None)  # the end of the terminal, on Unix systems
STOPS = [signal.SIGINT, signal.SIGTERM, *([HANGUP] if HANGUP else [])]


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and did; what it had done is saved if it has a folder.

    Attributes:
        round: rounds done.
        signal: the signal's number, or TIME_IS_UP.
        testing: whether all rounds were done, and clients were being tested; nothing of that is saved.
    """

    def __init__(self, round_: int, number: int, testing: bool = False) -> None:
        super().__init__(f"stopped {'in the test ' if testing else ''}after round {round_}")
        self.round, self.signal, self.testing = round_, number, testing


class Signals(list[int]):
    """The signals that came, to be looked at by whoever can stop.

    Args:
        tell: is told, in a sentence, when the first one comes; None for silence.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._tell = tell
        self._error: Callable[[int], BaseException] | None = None

    @contextmanager
    def raising(self, error: Callable[[int], BaseException]) -> Iterator[None]:
        """Let a signal end the block wherever it is: for work that takes long and leaves nothing half done behind.

        Args:
            error: what is raised, of the signal's number; at once, where a signal has come already.
        """
        if self:
            raise error(self[0])
        self._error = error
        try:
            yield
        finally:
            self._error = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Take in a signal, as its handler; the second one ends everything."""
        del frame
        if number == HANGUP and self:
            return  # a terminal that is closed sends it twice, by way of the shell and itself
        # Never so for the end of the terminal: the other one may come between the line above and this one.
        again = number != HANGUP and any(earlier != TIME_IS_UP for earlier in self)
        self.append(number)
        if again:
            raise KeyboardInterrupt
        if self._error is not None:
            raise self._error(number)
        if self._tell is not None:
            # By a thread: this one may be in the middle of writing to the very place that is written to.
            threading.Thread(target=self._tell, args=(STOPPING,), daemon=True).start()


@contextmanager
def stop_signals(seconds: float | None = None, tell: Callable[[str], None] | None = None) -> Iterator[Signals]:
    """Collect Ctrl-C, SIGTERM and the end of the terminal instead of dying of them; one more ends everything.

    But not the end of the terminal: whoever has asked to stop may then close it.

    Args:
        seconds: after which TIME_IS_UP is among the signals; None for never.
        tell: is told, in a sentence, when the first signal comes; None for silence.
    """
    received = Signals(tell)
    # Only the main thread may ask for signals; and who started this with `nohup` wants to hear nothing of the terminal.
    caught = STOPS if threading.current_thread() is threading.main_thread() else []
    if HANGUP and signal.getsignal(HANGUP) is signal.SIG_IGN:
        caught = [number for number in caught if number != HANGUP]
    timer = None if seconds is None else threading.Timer(max(0.0, seconds), received.append, (TIME_IS_UP,))
    before = {number: signal.signal(number, received.note) for number in caught}
    try:
        if timer is not None:
            timer.daemon = True
            timer.start()
        yield received
    finally:
        if timer is not None:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
