"""Progress of a run: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Self

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pefll.core.wording import harmless

LINE_SECONDS, QUIET_SECONDS = 10.0, 2.0


def say(console: Console, sentence: str) -> None:
    """Print a sentence in one line, so that users can copy it. It has no markup and no controls."""
    try:
        console.print(harmless(sentence), highlight=False, markup=False, soft_wrap=True)
    except OSError:
        if console.file is sys.stdout:  # standard output has the results, which must not get lost
            raise
        # Other output is progress only: a run must go on although its terminal was closed.


def clock(seconds: float) -> str:
    """Return a time as `"42 s"`, or as h:mm:ss from one minute on."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def time_left(seconds: float) -> str:
    """Return an estimated time as `"42 s left"`, or as h:mm from one minute on, such as `"2:37 h left"`."""
    minutes = round(seconds / 60)
    return f"{round(seconds)} s left" if round(seconds) < 60 else f"{minutes // 60}:{minutes % 60:02} h left"


class Monitor(AbstractContextManager["Monitor"]):
    """Shows the progress of one job. This base class shows nothing."""

    def __exit__(self, *_: object) -> None:
        return

    def at(self, done: int, news: str = "") -> None:
        """Show the number of finished steps, `done`, and the text of the latest measurement, `news`."""

    def say(self, sentence: str) -> None:
        """Print a sentence without disturbing the bar."""


class Display(AbstractContextManager["Display"]):
    """Shows several monitors, one line each. This base class shows nothing."""

    def __exit__(self, *_: object) -> None:
        return

    def line(self, title: str, total: int, done: int = 0) -> Monitor:
        """Return a monitor for a job of `total` steps. At the end of its `with` block, it disappears.

        `done` steps were done earlier. The estimate of the time left ignores them.
        """
        del title, total, done
        return Monitor()


class Bars(Display):
    """Progress bars one below the other, in a terminal."""

    def __init__(self, console: Console) -> None:
        self._is_shown = True
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.fields[news]}", markup=False),
            console=console,
            transient=True,
        )

    def __enter__(self) -> Self:
        try:
            self._progress.start()
        except LiveError:  # older versions of rich allow one display at a time, and another thread has one
            self._is_shown = False
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # see `say`
            if self._is_shown:
                self._progress.stop()

    def line(self, title: str, total: int, done: int = 0) -> Bar:
        """Add a bar."""
        return Bar(self._progress, title, total, done)


class Bar(Monitor):
    """A progress bar with the time left."""

    def __init__(self, progress: Progress, title: str, total: int, done: int) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total, completed=done, news="", left="")
        self._total, self._speed, self._news = total, _Speed(done), ""

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._progress.refresh()  # show the last step
        self._progress.remove_task(self._task)

    def at(self, done: int, news: str = "") -> None:
        """Move the bar."""
        seconds = self._speed.of_step(done)
        left = time_left(seconds * (self._total - done)) if seconds else ""
        self._news = news or self._news
        self._progress.update(self._task, completed=done, left=left, news=self._news)

    def say(self, sentence: str) -> None:
        """Print above the bar."""
        say(self._progress.console, sentence)


class _Speed:
    """Measures the time of a step.

    Steps end in bursts if processes share them: two clients of two processes end at the same time, long after their
    start. So the time before the first burst counts, until as much time has passed again. After that it does not,
    because the first steps also start processes, and load and compile code.
    """

    def __init__(self, done: int) -> None:
        self._first = self._burst = done
        self._started = self._at_burst = time.monotonic()

    def of_step(self, done: int) -> float:
        """Return the seconds per step when `done` steps are done; 0 if it is unknown."""
        now = time.monotonic()
        if done <= self._first:
            return 0.0
        if self._burst == self._first:
            self._burst, self._at_burst = done, now
        if done > self._burst and now - self._at_burst >= self._at_burst - self._started:
            return (now - self._at_burst) / (done - self._burst)
        return (now - self._started) / (done - self._first)


class Log(Display):
    """Prints the progress of all jobs as lines of text, for output that is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, title: str, total: int, done: int = 0) -> Lines:
        """Return a monitor that prints lines."""
        return Lines(self._console, title, total, done)


class Lines(Monitor):
    """Prints at most one line in ten seconds, and one at the end of a job that took more than two seconds."""

    def __init__(self, console: Console, title: str, total: int, done: int) -> None:
        self._console, self._title, self._total, self._first = console, title, total, done
        self._started = self._last = time.monotonic()

    def at(self, done: int, news: str = "") -> None:
        """Print a line if the last one was printed long enough ago."""
        now = time.monotonic()
        finished = done >= self._total and now - self._started > QUIET_SECONDS
        if not finished and now - self._last < LINE_SECONDS:
            return
        self._last = now
        elapsed = now - self._started
        line = f"{self._title}: {done}/{self._total}, {clock(elapsed)}"
        if done > self._first:
            line += f", {time_left(elapsed / (done - self._first) * (self._total - done))}"
        self.say(f"{line}, {news}" if news else line)

    def say(self, sentence: str) -> None:
        """Print a line."""
        say(self._console, sentence)


def display(console: Console | None) -> Display:
    """Return bars for a terminal, lines for another output, and nothing without a console."""
    if console is None:
        return Display()
    return Bars(console) if console.is_terminal else Log(console)


@contextmanager
def monitor(console: Console | None, title: str, total: int, done: int = 0) -> Iterator[Monitor]:
    """Yield a monitor on a new display; see `Display.line`."""
    with display(console) as screen, screen.line(title, total, done) as watch:
        yield watch
