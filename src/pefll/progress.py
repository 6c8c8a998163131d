"""What a user sees while a run goes on: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

LINE_SECONDS = 10.0


class Monitor(Protocol):
    """Is told how far a job is."""

    def __enter__(self) -> Monitor: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def at(self, done: int, news: str = "") -> None:
        """Say that `done` steps are done; `news` is the latest measurement, in words."""
        ...

    def say(self, sentence: str) -> None:
        """Print a sentence without disturbing the bar."""
        ...


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def at(self, done: int, news: str = "") -> None:
        """Show nothing."""

    def say(self, sentence: str) -> None:
        """Show nothing."""


class Bar:
    """A progress bar with the time left."""

    def __init__(self, console: Console, title: str, total: int, done: int = 0) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            Remaining(),
            TextColumn("{task.fields[news]}"),
            console=console,
        )
        self._task = self._progress.add_task(title, total=total, completed=done, news="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def at(self, done: int, news: str = "") -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done, **({"news": news} if news else {}))

    def say(self, sentence: str) -> None:
        """Print above the bar."""
        self._progress.console.print(sentence, highlight=False, soft_wrap=True)


class Lines:
    """Plain lines, at most one in ten seconds, and one at the end."""

    def __init__(self, console: Console, title: str, total: int, done: int = 0) -> None:
        self._console, self._title, self._total = console, title, total
        self._started, self._first = time.monotonic(), done
        self._last = self._started

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def at(self, done: int, news: str = "") -> None:
        """Print a line, if the last one is long enough ago."""
        now = time.monotonic()
        if done < self._total and now - self._last < LINE_SECONDS:
            return
        self._last = now
        elapsed = now - self._started
        left = elapsed / max(1, done - self._first) * (self._total - done)
        line = f"{self._title}: {done}/{self._total}, {elapsed:.0f} s, {left:.0f} s left"
        self.say(f"{line}, {news}" if news else line)

    def say(self, sentence: str) -> None:
        """Print a line."""
        self._console.print(sentence, highlight=False, soft_wrap=True)


def monitor(console: Console | None, title: str, total: int, done: int = 0) -> Monitor:
    """Return the monitor that fits where the output goes: a bar, lines, or nothing without a console."""
    if console is None:
        return Silent()
    return Bar(console, title, total, done) if console.is_terminal else Lines(console, title, total, done)
