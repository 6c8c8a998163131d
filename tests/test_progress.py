"""What a user sees while a run goes on."""

from __future__ import annotations

import errno
import io
import sys

import pytest
from rich.console import Console

from pefll.core import progress
from pefll.core.progress import Bar, Lines, Monitor, display, monitor


def test_nothing_without_a_console():
    with monitor(None, "title", 10) as watch:
        assert type(watch) is Monitor
        watch.at(3, "news")
        watch.say("hello")


def test_lines_come_at_most_every_ten_seconds_and_at_the_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    with monitor(Console(file=file, width=20), "pefll seed 0", 100, done=20) as watch:
        assert isinstance(watch, Lines)
        for seconds, done, news in ((1, 30, ""), (11, 40, "seen 10.0%"), (12, 50, ""), (40, 60, ""), (41, 100, "x")):
            now[0] = seconds
            watch.at(done, news)
        watch.say("a sentence that is longer than twenty columns")
    assert file.getvalue().splitlines() == [
        "pefll seed 0: 40/100, 11 s, 33 s left, seen 10.0%",
        "pefll seed 0: 60/100, 40 s, 40 s left",
        "pefll seed 0: 100/100, 41 s, 0 s left, x",
        "a sentence that is longer than twenty columns",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "0:01 h"), (700, "0:12 h"), (9400, "2:37 h")]
)
def test_the_time_left(seconds, shown):
    assert progress.time_left(seconds) == f"{shown} left"


def test_the_time_left_of_clients_that_end_in_bursts(monkeypatch):
    """Two processes train two clients in 20 s. The bar said that all 100 clients take 15 s more."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    speed, shown = progress._Speed(0), []
    for seconds, done in ((10, 0), (20, 1), (20.3, 2), (40, 3), (40.3, 4), (60, 6)):
        now[0] = seconds
        shown.append(speed.of_step(done))
    assert shown == pytest.approx([0, 20, 10.15, 10, 6.77, 8], abs=0.01)
    now[0] = 100.0
    slow_start = progress._Speed(50)  # a resumed run, whose first rounds load code
    for seconds, done, of_step in ((103, 51, 3.0), (104, 101, 4 / 51), (107, 251, 4 / 200)):
        now[0] = seconds
        assert slow_start.of_step(done) == pytest.approx(of_step)


def test_nobody_knows_how_long_it_takes_before_something_is_done(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    with monitor(Console(file=file), "testing", 100) as watch:
        now[0] = 12.0
        watch.at(0)
    assert file.getvalue() == "testing: 0/100, 12 s\n"


@pytest.mark.parametrize("place", ["runs/a[b]", "runs/[/x]", "[bold]"])
def test_brackets_in_paths_are_shown_as_they_are(place, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", -1.0)
    for terminal in (False, True):
        file = io.StringIO()
        with monitor(Console(file=file, width=100, force_terminal=terminal), "title", 10) as watch:
            watch.say(f"the checkpoint {place} is damaged")
            watch.at(10, place)
        assert f"the checkpoint {place} is damaged" in file.getvalue()
        assert file.getvalue().count(place) >= 2


def test_a_bar_in_a_terminal():
    file = io.StringIO()
    with monitor(Console(file=file, width=120, force_terminal=True), "pefll seed 0", 10, done=3) as watch:
        assert isinstance(watch, Bar)
        watch.at(4, "seen 12.5%")
        watch.at(10)
        watch.say("hello")
    text = file.getvalue()
    assert "10/10" in text
    assert "seen 12.5%" in text
    assert "hello" in text


def test_a_result_that_cannot_be_written_is_no_success(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left"):
        progress.say(Console(), "87% of all samples are right")
    progress.say(Console(file=Full()), "seed 0: going on")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_was_closed_stops_nobody(terminal):
    class Closed(io.StringIO):
        closed_by_user = False

        def write(self, text):
            if self.closed_by_user:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    file = Closed()
    with monitor(Console(file=file, force_terminal=terminal), "pefll seed 0", 10) as watch:
        watch.at(1, "news")
        file.closed_by_user = True
        watch.at(10, "more news")
        watch.say("a sentence")
    assert "a sentence" not in file.getvalue()


def test_several_jobs_are_lines_of_one_display(monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", -1.0)
    for terminal in (False, True):
        file = io.StringIO()
        with display(Console(file=file, width=120, force_terminal=terminal)) as screen:
            with screen.line("seed 0", 10) as one, screen.line("seed 1", 10) as two:
                one.at(10, "seen 12.5%")
                two.say("seed 1 failed")
                two.at(7)
            with screen.line("testing", 5) as test:
                test.at(5)
        text = file.getvalue()
        for part in ("seed 0", "10/10", "seen 12.5%", "seed 1 failed", "testing", "5/5"):
            assert part in text
        assert ("7/10" in text.replace(" ", "")) == terminal  # a line is printed only at the end or now and then
    with display(None) as screen, screen.line("seed 0", 3) as silent:
        silent.at(3)


def test_a_sentence_with_escape_codes_is_shown_without_them():
    screen = io.StringIO()
    progress.say(Console(file=screen), "client \x1b[2J[bold]ann\x9b1m")
    assert screen.getvalue() == "client [2J[bold]ann1m\n"
