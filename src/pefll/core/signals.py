"""Handlers of Ctrl-C, SIGTERM and SIGHUP. A run records these signals and stops after its current rounds."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = "stopping after the rounds that are under way; Ctrl-C again ends at once"
TIME_IS_UP = 14  # recorded like a signal when a run's time limit is over; 14 is the number of SIGALRM
HANGUP = getattr(signal, "SIGHUP", None)  # the terminal was closed; Unix systems only
STOPS = [signal.SIGINT, signal.SIGTERM, *([HANGUP] if HANGUP else [])]


class Stopped(KeyboardInterrupt):
    """The run stopped because of a signal. Its rounds are saved if it has a folder.

    Attributes:
        round: number of finished rounds.
        signal: number of the signal, or TIME_IS_UP.
        testing: whether the final test was stopped; the test saves nothing before its end.
    """

    def __init__(self, round_: int, number: int, testing: bool = False) -> None:
        super().__init__(f"stopped {'in the test ' if testing else ''}after round {round_}")
        self.round, self.signal, self.testing = round_, number, testing


class Signals(list[int]):
    """The list of signals received so far. At the first signal, it calls `tell` with a sentence."""

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._tell = tell
        self._error: Callable[[int], BaseException] | None = None

    @contextmanager
    def raising(self, error: Callable[[int], BaseException]) -> Iterator[None]:
        """Raise `error(signal)` inside the block when a signal comes, or at once if one came before.

        Use it for long work that may be interrupted anywhere.
        """
        if self:
            raise error(self[0])
        self._error = error
        try:
            yield
        finally:
            self._error = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: record it. The second signal raises KeyboardInterrupt."""
        del frame
        if number == HANGUP and self:
            return  # a closed terminal sends SIGHUP twice: directly, and through the shell
        # SIGHUP never counts as the second signal: its second copy may arrive right after the check above.
        again = number != HANGUP and any(earlier != TIME_IS_UP for earlier in self)
        self.append(number)
        if again:
            raise KeyboardInterrupt
        if self._error is not None:
            raise self._error(number)
        if self._tell is not None:
            # In another thread: the signal may have interrupted this thread while it was printing.
            threading.Thread(target=self._tell, args=(STOPPING,), daemon=True).start()


@contextmanager
def stop_signals(seconds: float | None = None, tell: Callable[[str], None] | None = None) -> Iterator[Signals]:
    """Yield the list that collects Ctrl-C, SIGTERM and SIGHUP inside the block; a second signal ends the process.

    SIGHUP does not count as the second one: a user who asked to stop may close the terminal.

    Args:
        seconds: time until TIME_IS_UP is added to the list; None for never.
        tell: is called with a sentence at the first signal; None for silence.
    """
    received = Signals(tell)
    # Only the main thread can handle signals. A run under `nohup` still ignores SIGHUP.
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
