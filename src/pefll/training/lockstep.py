"""Several runs on one device at once: one thread gives each a turn, and nobody waits while another has work to queue.

A run is a generator. It yields when it has given its device work to do, so that the others give it theirs before
anybody waits for a result. On a GPU the runs' kernels then fill each other's gaps. Each run computes what it would
compute alone: it has its own engine, and turns decide when something is computed, never what.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from pefll.core.errors import PefllError
from pefll.core.wording import either

T = TypeVar("T")
STOPPING = "stopping after the rounds that are under way; Ctrl-C again ends at once"
TIME_IS_UP = 14  # what stands for a signal where a run was given only so many seconds: the number of SIGALRM
HANGUP = getattr(signal, "SIGHUP", None)  # the end of the terminal, on Unix systems
STOPS = [signal.SIGINT, signal.SIGTERM, *([HANGUP] if HANGUP else [])]
Turns: TypeAlias = Generator[None, None, T]


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


class ScheduledRun(NamedTuple):
    """A run among others.

    Attributes:
        turns: the run.
        turn: returns a context to hold during each of its turns: its engine's.
    """

    turns: Turns[Any]
    turn: Callable[[], AbstractContextManager[Any]]


def round_robin(jobs: Sequence[ScheduledRun]) -> list[Any]:
    """Give each job a turn after the other until all have ended.

    Returns:
        What each job returned; or the PefllError or `Stopped` that it ended with, which does not keep the others from
        going on.
    """
    outcomes: dict[int, Any] = {}
    try:
        while len(outcomes) < len(jobs):
            for place, job in enumerate(jobs):
                if place not in outcomes:
                    try:
                        with job.turn():
                            next(job.turns)
                    except StopIteration as end:
                        outcomes[place] = end.value
                    except (PefllError, Stopped) as error:
                        outcomes[place] = error
                    except torch.OutOfMemoryError:
                        outcomes[place] = PefllError(
                            "the GPU's memory is full: train fewer seeds at once, or fewer clients a round; "
                            f"{either('`--resume`', 'the same folder as out')} goes on from the last checkpoint",
                            code="PEFLL-T116",
                        )
    finally:
        for job in jobs:  # where one broke down or Ctrl-C came twice, the others put down what they hold
            job.turns.close()
    return [outcomes[place] for place in range(len(jobs))]


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
