"""How long a run will take: measured, told once, and only where it helps."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from rich.console import Console

from pefll.core.progress import clock
from pefll.training.estimate import Estimate, about
from pefll.training.pipeline import STRETCH_SECONDS
from pefll.training.resolve import resolve
from tests.federations import ragged


def stretch(first: int, last: int, seconds: float) -> SimpleNamespace:
    return SimpleNamespace(first=first, last=last, rounds=SimpleNamespace(seconds=seconds))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (62, "about a minute"),
        (700, "about 12 minutes"),
        (5000, "about 83 minutes"),
        (9400, "about 2.6 hours"),
        (260_000, "about 3.0 days"),
    ],
)
def test_rough_times(seconds, words):
    assert about(seconds) == words


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0 s"), (59.4, "59 s"), (61, "0:01:01"), (9400, "2:36:40")])
def test_times_of_the_progress(seconds, shown):
    assert clock(seconds) == shown


class FakeRun:
    """A run whose rounds take the seconds of a fake clock, in stretches as the pipeline cuts them."""

    def __init__(self, rounds: int, seconds: Callable[[int], float], runs_at_once: int = 1) -> None:
        estimate, self.told, size, done, self.clock = Estimate(rounds, runs_at_once), [], 1, 0, 0.0
        while done < rounds:
            size = min(size, rounds - done)
            spent = sum(map(seconds, range(done, done + size)))
            self.clock += spent
            if sentence := estimate.after(stretch(done, done + size, spent)):
                self.told.append((sentence, self.clock))
            done += size
            size = max(1, min(4 * size, int(STRETCH_SECONDS / (spent / size))))


def warming_up(usual: float) -> Callable[[int], float]:
    """The rounds of a run on two busy cores: the first ones start processes, and load code."""
    return lambda round_: usual + {0: 2.2, 1: 0.8, 2: 0.3, 9: 0.4}.get(round_, 0.0)


@pytest.mark.parametrize("usual", [0.02, 0.09, 0.24])
def test_runs_that_end_within_a_minute_are_not_estimated(usual):
    """300 rounds in 27 seconds were said to take 11 minutes."""
    run = FakeRun(int(50 / usual), warming_up(usual))
    assert run.told == []
    assert run.clock < 70


@pytest.mark.parametrize("usual", [0.004, 0.09, 0.4, 3.0, 30.0])
@pytest.mark.parametrize("runs_at_once", [1, 3])
def test_the_estimate_is_that_of_rounds_after_the_first_ones(usual, runs_at_once):
    run = FakeRun(int(3600 / usual), warming_up(usual), runs_at_once)
    ((sentence, at),) = run.told  # told once
    minutes = float(re.search(r"about ([\d.]+)", sentence)[1]) * (60 if "hours" in sentence else 1)
    assert minutes == pytest.approx(60 * runs_at_once, rel=0.05)
    assert at < 2 * usual + 25, "early enough"


def test_a_pause_of_the_machine_does_not_matter():
    pauses = {3: 4.0, 12: 2.0}
    run = FakeRun(10_000, lambda round_: pauses.get(round_, 0.09))
    assert [sentence for sentence, _ in run.told] == ["the rounds take about 15 minutes on this CPU"]


def test_slow_rounds_are_measured_after_the_first():
    assert FakeRun(1001, lambda round_: 9.0).told == [("the rounds take about 2.5 hours on this CPU", 36.0)]


def test_a_user_is_told(monkeypatch):
    from pefll.runs.config import Config
    from pefll.training import estimate, fitting

    for name in ("MEASURED_SECONDS", "MEASURED_STRETCHES", "LEAST_SECONDS"):
        monkeypatch.setattr(estimate, name, 0)
    console = Console(file=io.StringIO(), width=200)
    config = Config(method="fedavg", rounds=3, clients_per_round=2, settings={"local_steps": 1}, processes=1)
    specs = [resolve(config, ragged())]
    fitting.runs_or_error(specs, fitting.train_all(specs, console))
    assert console.file.getvalue().count("fedavg seed 0: the rounds take about a minute on this CPU") == 1
