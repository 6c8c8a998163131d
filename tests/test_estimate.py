"""How long a run will take: told before its first round, corrected once, and only where it helps."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.core.progress import clock
from pefll.core.tree import leaves
from pefll.engines.cohort import Ledger
from pefll.runs.config import Config
from pefll.training import estimate, fitting, loop
from pefll.training.estimate import Estimate, about
from pefll.training.pipeline import STRETCH_SECONDS
from pefll.training.resolve import resolve
from tests.federations import ragged


def stretch(first: int, last: int, seconds: float) -> SimpleNamespace:
    return SimpleNamespace(first=first, last=last, rounds=SimpleNamespace(seconds=seconds))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "about 1 s"),
        (40, "about 40 s"),
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


def test_an_estimate_told_before_the_first_round_is_corrected_only_if_it_was_wrong():
    def told(before):
        estimate = Estimate(1001, told=before)
        return [said for round_ in range(9) if (said := estimate.after(stretch(round_, round_ + 1, 9.0)))]

    assert told(0.0) == ["the rounds take about 2.5 hours on this CPU"]
    assert told(8.0) == told(12.0) == []
    assert told(5.0) == ["the rounds take about 2.5 hours on this CPU, as the first ones show"]


def started(method, engine, console, out=None, rounds=6, **settings):
    config = Config(
        method=method,
        rounds=rounds,
        clients_per_round=3,
        settings=settings,
        engine=engine,
        device="cpu",
        processes=2 if engine == "serial" else 1,
        eval_every=3,
    )
    specs = [resolve(config, ragged(), out)]
    return fitting.runs_or_error(specs, fitting.train_all(specs, console))[0]


SHORT = {"local": {"epochs": 2}, "fedrep": {"head_epochs": 1, "body_epochs": 1}}


@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize("method", ["fedavg", "pefll", "fedrep", "scaffold", "local"])
def test_a_user_is_told_before_the_first_round_and_the_run_stays_the_same(method, engine, monkeypatch):
    """With a console, a trial goes before the first round. It changes neither the run nor its counts of bytes."""
    monkeypatch.setattr(estimate, "LEAST_SECONDS", 0)
    settings = SHORT.get(method, {"local_steps": 1})
    silent = started(method, engine, None, **settings)
    said = []

    class Told(Console):
        def print(self, *words, **more):
            said.append((words[0], rounds[:]))

    rounds: list[int] = []
    monkeypatch.setattr(
        loop.Pipeline, "launch", lambda self, launch=loop.Pipeline.launch: (rounds.append(1), launch(self))
    )
    run = started(method, engine, Told(file=io.StringIO()), **settings)
    doing = "training all clients takes" if method == "local" else "the rounds take"
    told = [before for words, before in said if f"{method} seed 0: {doing} about 1 s on this CPU" in str(words)]
    assert told == [[]], said
    for ours, theirs in zip(leaves(run.final), leaves(silent.final), strict=True):
        assert torch.equal(ours, theirs)
    for key in ("bytes_up", "bytes_down", "accuracy", "best_round"):
        assert run.summary[key] == silent.summary[key]


def test_a_gpu_is_named_where_there_is_a_figure():
    assert estimate.seconds_on_gpu("lenet", 32, 5000 * 5 * 50, 5) == pytest.approx(34, rel=0.1), "docs/performance.md"
    assert estimate.seconds_on_gpu("lenet", 32, 1e6, 40) == estimate.seconds_on_gpu("lenet", 32, 1e6, 50)
    for unknown in (("cnn", 32, 1e6, 5), ("lenet", 64, 1e6, 5), ("lenet", 32, 0, 5)):
        assert estimate.seconds_on_gpu(*unknown) == 0.0
    engine = SimpleNamespace(
        name="vector", device=torch.device("cpu"), ledger=Ledger(), advance=lambda *_: time.sleep(0.02)
    )
    config = SimpleNamespace(rounds=500_000)
    spec = SimpleNamespace(
        config=config, clients_per_round=5, method=SimpleNamespace(trains_in_rounds=True, batch_size=32), model="lenet"
    )
    sentence, of_round = estimate.before_first_round(engine, spec, SimpleNamespace(round=0, server=None), 1)
    assert re.fullmatch(
        r"the rounds take about (2\.[89]|3\.\d) hours on this CPU; on a GPU \(H200\) about a minute", sentence
    )
    assert of_round == pytest.approx(0.02, rel=0.2)
    remote = SimpleNamespace(name="flower", device=torch.device("cpu"))
    assert estimate.before_first_round(remote, spec, None, 1) == ("", 0.0)


def test_a_long_run_on_little_data_gets_advice(monkeypatch):
    spec = SimpleNamespace(federation=ragged(), config=SimpleNamespace(rounds=1000))
    long = estimate.Told("the rounds take about 3 hours on this CPU", 10.0)
    said = estimate.advice(long, spec, 1, False)
    assert "59 training samples" in said
    assert "try rounds=250, or" in said
    assert "EarlyStopping" in said
    assert "EarlyStopping" not in estimate.advice(long, spec, 1, True)
    assert estimate.advice(long._replace(of_round=0.1), spec, 1, False) == ""
    assert estimate.advice(long._replace(of_round=0.1), spec, 2, False) != "", "two runs take turns"
    monkeypatch.setattr(estimate, "LITTLE_DATA", 1)
    assert estimate.advice(long, spec, 1, False) == ""


def test_a_trial_that_fails_leaves_the_error_to_the_run(monkeypatch):
    def fails(*_):
        raise PefllError("training diverged in round 0", code="PEFLL-E001")

    engine = SimpleNamespace(name="vector", device=torch.device("cpu"), ledger=Ledger(1, 2, 3), advance=fails)
    spec = SimpleNamespace(
        config=SimpleNamespace(rounds=9), clients_per_round=5, method=SimpleNamespace(trains_in_rounds=True)
    )
    progress = SimpleNamespace(round=0, server=None)
    assert estimate.before_first_round(engine, spec, progress, 1) == ("", 0.0)
    assert engine.ledger == Ledger(1, 2, 3)


def test_local_has_one_bar_that_counts_clients():
    """It had a bar of 0/0 rounds before that, and "0 rounds of 3 clients" as its headline."""
    file = io.StringIO()
    started("local", "serial", Console(file=file, width=200, force_terminal=True), epochs=2)
    assert "0/0" not in file.getvalue()
    assert "local seed 0" not in file.getvalue()
    assert "no rounds, cpu" in file.getvalue()
    assert re.search(r"training and testing seed 0.*\d+/\d+", file.getvalue())
