"""Clients that train when they are tested, as Local's do: one is told how far they are, and they can be stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from pefll import cli
from pefll.core.progress import Display, Monitor
from pefll.core.signals import Signals, Stopped
from pefll.engines.serial import SerialEngine
from pefll.methods import METHODS, build_method
from pefll.runs.record import RunFolder
from pefll.training import fitting
from pefll.training.estimate import Told
from pefll.training.fitting import fit, fit_seeds
from tests.federations import problem_of, ragged

QUICK = {"epochs": 2, "processes": 1}


class Heard(Display, Monitor):
    """A display that writes down how far each job was, and how far it was to go."""

    def __init__(self) -> None:
        self.titles: dict[str, int] = {}
        self.done: list[int] = []

    def line(self, title: str, total: int, done: int = 0) -> Heard:
        self.titles[title] = total
        return self

    def at(self, done: int, news: str = "") -> None:
        self.done.append(done)


def scored(summary: dict) -> tuple:
    return summary["accuracy"], summary["client_counts"], summary["bytes_down"], summary["bytes_up"]


@contextmanager
def at_client(monkeypatch, number: int, action, method: str = "local", task: str = "train", after: Path | None = None):
    """Do something while the client that comes as `number` does a task; yield a list of the calls.

    Calls count from when `after` is there.
    """
    calls: list[str] = []
    kind = METHODS[method]
    original = getattr(kind, task)

    def instead(self, client, *given, **static):
        if after is None or after.exists():
            calls.append(task)
            if len(calls) == number:
                action()
        return original(self, client, *given, **static)

    instead.__name__ = task  # by which other processes are asked for it
    with monkeypatch.context() as patch:
        patch.setattr(kind, task, instead)
        yield calls


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_local_tells_of_every_client(monkeypatch):
    totals = []
    for processes in (1, 2):
        heard = Heard()
        monkeypatch.setattr(fitting, "display", lambda _, heard=heard: heard)
        run = fit(ragged(), "local", engine="serial", **QUICK | {"processes": processes})
        clients = run.summary["num_clients"]
        assert heard.titles["training and testing seed 0"] == clients
        assert sorted(set(heard.done) - {0}) == list(range(1, clients + 1))
        assert heard.done == sorted(heard.done)
        totals.append(scored(run.summary))
    assert totals[0] == totals[1]


@pytest.mark.parametrize(
    ("method", "task", "settings"),
    [
        ("fedrep", "join_in", {"head_epochs": 1}),
        ("pfedme", "join_in", {"local_rounds": 1}),
        ("pfedhn", "predict", {"hypernetwork": "S", "local_steps": 1, "new_rounds": 2}),
        ("per-fedavg", "adapt", {"epochs": 1}),
    ],
)
def test_a_test_in_which_new_clients_train_is_stopped_and_done_again(tmp_path, monkeypatch, method, task, settings):
    given = {"rounds": 2, "clients_per_round": 2, "eval_every": 10, "processes": 1, "engine": "serial"} | settings
    whole = fit(ragged(), method, out=tmp_path / "whole", **given)
    trained = RunFolder(tmp_path / "stopped").checkpoints / "round-00000002"
    with at_client(monkeypatch, 2, ctrl_c, method, task, trained) as tested, pytest.raises(Stopped) as stopped:
        fit(ragged(), method, out=tmp_path / "stopped", **given)
    assert (stopped.value.round, stopped.value.testing, len(tested)) == (2, True, 2)
    assert RunFolder(tmp_path / "stopped").summary() is None
    assert scored(fit(ragged(), method, out=tmp_path / "stopped", **given).summary) == scored(whole.summary)


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_local_stops_in_the_middle_of_a_client_and_begins_again(tmp_path, monkeypatch, engine):
    whole = fit(ragged(), "local", engine=engine, **QUICK)
    ended: list[bool] = []

    def stop() -> None:
        ctrl_c()
        ended.append(True)

    with at_client(monkeypatch, 3 if engine == "serial" else 1, stop) as came, pytest.raises(Stopped) as stopped:
        fit(ragged(), "local", out=tmp_path, engine=engine, **QUICK)
    assert len(came) == (3 if engine == "serial" else 1)
    assert ended == []  # not even the client that was at work went on
    assert (stopped.value.round, stopped.value.testing, stopped.value.signal) == (0, True, signal.SIGINT)
    assert RunFolder(tmp_path).summary() is None
    assert scored(fit(ragged(), "local", out=tmp_path, engine=engine, **QUICK).summary) == scored(whole.summary)


def test_several_seeds_stop_together_and_keep_what_has_ended(tmp_path, monkeypatch):
    whole = fit_seeds(ragged(), "local", seeds=[0, 1, 2], engine="serial", **QUICK)
    clients = whole[0].summary["num_clients"]
    with at_client(monkeypatch, clients + 2, ctrl_c) as came, pytest.raises(Stopped):
        fit_seeds(ragged(), "local", seeds=[0, 1, 2], out=tmp_path, engine="serial", **QUICK)
    assert len(came) == clients + 2  # nobody of the third seed began
    summaries = [RunFolder(tmp_path / f"seed-{seed}").summary() for seed in (0, 1, 2)]
    assert [summary is None for summary in summaries] == [False, True, True]
    again = fit_seeds(ragged(), "local", seeds=[0, 1, 2], out=tmp_path, engine="serial", **QUICK)
    assert [scored(run.summary) for run in again] == [scored(run.summary) for run in whole]


def test_a_signal_raises_only_inside_the_block_and_one_that_came_before_at_its_start():
    signals = Signals()
    with pytest.raises(Stopped, match="in the test after round 3"), signals.raising(lambda n: Stopped(3, n, True)):
        signals.note(signal.SIGINT, None)
    with pytest.raises(Stopped), signals.raising(lambda n: Stopped(3, n, True)):
        pytest.fail("it began")
    signals.clear()
    with signals.raising(lambda n: Stopped(3, n, True)):
        pass
    signals.note(signal.SIGINT, None)
    assert signals == [signal.SIGINT]


def test_processes_whose_replies_nobody_wants_any_more_are_ended(monkeypatch):
    monkeypatch.setattr(METHODS["local"], "train", _sleep)
    data = ragged()
    engine = SerialEngine(data, build_method("local", problem_of(data), {}), 0, 2, processes=2)
    try:
        server = engine.start()
        ((_, cohort),) = engine.cohorts(np.arange(3))
        beats: list[bool] = []

        def on_progress(made: bool) -> None:
            beats.append(made)
            raise KeyboardInterrupt

        cohort.on_progress = on_progress
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            engine.method.personalize(server, cohort)
        assert beats == [False]  # it was heard while all were at work
        assert not any(process.is_alive() for process in engine.workers._processes)
    finally:
        engine.close()
    assert time.monotonic() - began < 4


def _sleep(self, client, theta):
    time.sleep(60)


_sleep.__name__ = "train"


# The command.

LONG = "--method local --data digits --clients 40 --engine serial --set epochs=100000 --processes 2"


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield the command once clients are at work; nothing of it is left after the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pefll", "train", *LONG.split(), "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A process that is killed would leave half a file of coverage behind.
        env={name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")},
    )
    try:
        wait_until_tested(process, folder)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_tested(process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 90
    while not (folder / "checkpoints" / "round-00000000").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail("it ended too early, or did not begin")
        time.sleep(0.02)
    time.sleep(1.0)  # now clients are at work


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_local_ends_within_seconds_with_its_processes_and_says_how_to_go_on(tmp_path, number, code):
    folder = tmp_path / "run"
    with started(folder) as process:
        began = time.monotonic()
        os.killpg(process.pid, number)  # as a terminal does: the whole group
        _, said = process.communicate(timeout=60)
        assert time.monotonic() - began < 15  # on a machine that is busy with other tests
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    assert process.returncode == code, said
    assert said.splitlines()[-1] == (
        "The run starts from the beginning next time: this method trains during the test, which is not saved. "
        f"Go on with: pefll train --resume {folder}"
    )


def main(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["pefll", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0


def test_a_second_ctrl_c_says_where_the_rest_is(tmp_path, monkeypatch, capsys):
    def twice() -> None:
        try:
            ctrl_c()
        finally:  # while the first one is on its way
            ctrl_c()

    short = "--method local --data digits --clients 8 --engine serial --processes 1 --set epochs=1"
    # Clients are counted from the test on, not from the trial that measures how long it will take.
    monkeypatch.setattr(fitting, "before_first_round", lambda *_: Told())
    with at_client(monkeypatch, 2, twice):
        assert main(monkeypatch, "train", *short.split(), "--out", tmp_path / "run") == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"Stopped at once. Go on from the last checkpoint with: pefll train --resume {tmp_path / 'run'}"
    assert main(monkeypatch, "train", "--resume", tmp_path / "run") == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 0


def test_a_run_that_is_stopped_in_its_test_says_that_only_the_test_is_left(tmp_path, monkeypatch, capsys):
    short = (
        "--method pefll --data digits --clients 8 --rounds 2 --clients-per-round 2 --set hypernetwork=S --engine serial"
    )
    evaluated = fitting.summary_of

    def interrupted(*given):
        ctrl_c()
        return evaluated(*given)

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "summary_of", interrupted)
        assert main(monkeypatch, "train", *short.split(), "--processes", 1, "--out", tmp_path / "run") == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        "Saved after round 2. Training has finished; only the test must be repeated. "
        f"Go on with: pefll train --resume {tmp_path / 'run'}"
    )
    assert main(monkeypatch, "train", "--resume", tmp_path / "run") == 0
