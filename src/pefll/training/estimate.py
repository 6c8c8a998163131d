"""How long a run will take, from rounds that were measured after the first ones."""

from __future__ import annotations

from statistics import median_low

from pefll.training.pipeline import Stretch

MEASURED_SECONDS = (
    3.0  # measure for this long, because the first rounds also start processes, and load and compile code
)
MEASURED_STRETCHES = 7  # and so many stretches, so that a few slow ones are not the median
LONG_SECONDS = 20.0  # stretches that took this long are measured well enough, however few
LEAST_SECONDS = 60.0  # no estimate for runs that end before


class Estimate:
    """Estimates once how long the rest of a run takes.

    The first round is not measured. Of the other stretches of rounds the median counts, not the slow ones.

    Args:
        rounds: number of rounds of the run.
        runs_at_once: number of runs that take turns.
    """

    def __init__(self, rounds: int, runs_at_once: int = 1) -> None:
        self._rounds, self._runs = rounds, runs_at_once
        self._began = self._told = False
        self._of_round: list[float] = []  # seconds per round of each measured stretch
        self._seconds = 0.0  # of all measured stretches

    def after(self, stretch: Stretch) -> str:
        """Return a sentence as soon as enough rounds are measured; "" before and afterwards."""
        if self._told:
            return ""
        if not self._began:  # the first stretch has one round
            self._began = True
            return ""
        seconds = stretch.rounds.seconds
        self._of_round.append(seconds / (stretch.last - stretch.first))
        self._seconds += seconds
        enough = self._seconds >= MEASURED_SECONDS and len(self._of_round) >= MEASURED_STRETCHES
        if not enough and self._seconds < LONG_SECONDS:
            return ""
        self._told = True
        left = median_low(self._of_round) * (self._rounds - stretch.last) * self._runs
        return f"the rounds take {about(left)} on this CPU" if left >= LEAST_SECONDS else ""


def about(seconds: float) -> str:
    """Return a rough time in words, such as `"about 12 minutes"` or `"about 2.6 hours"`."""
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 90:
        return "about a minute" if round(minutes) <= 1 else f"about {minutes:.0f} minutes"
    return f"about {hours:.1f} hours" if hours < 48 else f"about {days:.1f} days"
