"""How long a run will take: measured, told once, and only where it helps."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from pefll.core.progress import clock
from pefll.training.estimate import Estimate, about
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


def test_a_slow_first_round_is_enough():
    estimate = Estimate(rounds=1001)
    assert estimate.after(stretch(0, 1, 9.0)) == "the rounds take about 2.5 hours on this CPU"
    assert estimate.after(stretch(1, 2, 9.0)) == ""  # told once


def test_quick_rounds_are_measured_for_a_second_and_without_the_first():
    estimate = Estimate(rounds=100_000, runs_at_once=2)
    assert estimate.after(stretch(0, 1, 0.9)) == ""  # loads code
    assert estimate.after(stretch(1, 5, 0.04)) == ""
    assert estimate.after(stretch(5, 21, 0.16)) == "the rounds take about 33 minutes on this CPU"


def test_short_runs_are_not_estimated():
    assert Estimate(rounds=50).after(stretch(0, 1, 1.1)) == ""


def test_a_user_is_told(monkeypatch):
    from pefll.runs.config import Config
    from pefll.training import estimate, fitting

    monkeypatch.setattr(estimate, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(estimate, "LEAST_SECONDS", 0.0)
    console = Console(file=io.StringIO(), width=200)
    config = Config(method="fedavg", rounds=3, clients_per_round=2, settings={"local_steps": 1}, processes=1)
    specs = [resolve(config, ragged())]
    fitting.runs_or_error(specs, fitting.train_all(specs, console))
    assert console.file.getvalue().count("fedavg seed 0: the rounds take about a minute on this CPU") == 1
