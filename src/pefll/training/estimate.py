"""How long a run will take, from its first measured rounds."""

from __future__ import annotations

from pefll.training.pipeline import Stretch

MEASURED_SECONDS = 1.0  # measure for this long, because the very first round also loads and compiles code
LEAST_SECONDS = 60.0  # no estimate for runs that end before


class Estimate:
    """Estimates once how long the rest of a run takes.

    Args:
        rounds: number of rounds of the run.
        runs_at_once: number of runs that take turns.
    """

    def __init__(self, rounds: int, runs_at_once: int = 1) -> None:
        self._rounds, self._runs = rounds, runs_at_once
        self._first: float | None = None  # seconds of the first stretch, which has one round
        self._seconds, self._measured, self._told = 0.0, 0, False

    def after(self, stretch: Stretch) -> str:
        """Return a sentence as soon as enough rounds are measured; "" before and afterwards."""
        seconds = stretch.rounds.seconds
        if self._told:
            return ""
        if self._first is None:
            self._first = seconds
        else:
            self._seconds, self._measured = self._seconds + seconds, self._measured + stretch.last - stretch.first
        if self._first + self._seconds < MEASURED_SECONDS:
            return ""
        self._told = True
        of_round = self._seconds / self._measured if self._measured else self._first
        left = of_round * (self._rounds - stretch.last) * self._runs
        return f"the rounds take {about(left)} on this CPU" if left >= LEAST_SECONDS else ""


def about(seconds: float) -> str:
    """Return a rough time in words, such as `"about 12 minutes"` or `"about 2.6 hours"`."""
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 90:
        return "about a minute" if round(minutes) <= 1 else f"about {minutes:.0f} minutes"
    return f"about {hours:.1f} hours" if hours < 48 else f"about {days:.1f} days"
