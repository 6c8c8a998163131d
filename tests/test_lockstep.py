"""Runs that take turns are the runs they would be alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from pathlib import Path
from queue import Queue

import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.core.signals import STOPPING, TIME_IS_UP, Signals, Stopped, stop_signals
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.runs.config import Config
from pefll.runs.federations import federations_of
from pefll.runs.record import RunFolder, own_seconds, run_folders
from pefll.training import fitting, pipeline, summary
from pefll.training.fitting import fit, fit_seeds
from pefll.training.resolve import resolve
from pefll.training.round_robin import ScheduledRun, round_robin
from tests.federations import ragged

QUICK = {"rounds": 12, "clients_per_round": 2, "local_steps": 2, "eval_every": 3, "checkpoint_every": 5, "processes": 1}
SEEDS = (0, 1, 2)


def states(run: Path) -> dict[str, str]:
    """The SHA-256 of each checkpoint's tensors, as they are on the disk."""
    files = sorted((run / "checkpoints").glob("*/state.safetensors"))
    assert files
    return {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def history(run: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in RunFolder(run).history()]


def same(one: Path, other: Path) -> None:
    assert states(one) == states(other)
    assert history(one) == history(other)
    mine, theirs = RunFolder(one).summary(), RunFolder(other).summary()
    for key in ("accuracy", "best_round", "rounds", "bytes_down", "bytes_up", "settings", "seed"):
        assert mine[key] == theirs[key]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("alone")
    for engine in ("serial", "vector"):
        for seed in SEEDS:
            fit(ragged(seed=seed), seed=seed, out=folder / engine / f"seed-{seed}", engine=engine, **QUICK)
    return {engine: folder / engine for engine in ("serial", "vector")}


# The driver.


def test_everybody_has_a_turn_in_order_and_an_error_ends_only_ones_own():
    said: list[str] = []

    def run(name: str, turns: int, end: Exception | None = None):
        for turn in range(turns):
            said.append(f"{name}{turn}")
            yield
        if end is not None:
            raise end
        return name

    error = PefllError("b has diverged")
    jobs = [ScheduledRun(run("a", 3), contextlib.nullcontext), ScheduledRun(run("b", 1, error), contextlib.nullcontext)]
    assert round_robin([*jobs, ScheduledRun(run("c", 2), contextlib.nullcontext)]) == ["a", error, "c"]
    assert said == ["a0", "b0", "c0", "a1", "c1", "a2"]


def test_each_turn_is_inside_its_own_context():
    inside: list[str] = []
    seen: list[list[str]] = []

    def turn(name):
        @contextlib.contextmanager
        def context():
            inside.append(name)
            yield
            inside.remove(name)

        return context

    def run():
        for _ in range(2):
            seen.append(list(inside))
            yield

    round_robin([ScheduledRun(run(), turn("a")), ScheduledRun(run(), turn("b"))])
    assert seen == [["a"], ["b"], ["a"], ["b"]]


def test_what_is_no_runs_own_fault_ends_all_and_closes_them():
    closed = []

    def holder(name):
        try:
            while True:
                yield
        finally:
            closed.append(name)

    def broken():
        yield
        raise ZeroDivisionError

    jobs = [ScheduledRun(turns, contextlib.nullcontext) for turns in (holder("a"), broken(), holder("b"))]
    with pytest.raises(ZeroDivisionError):
        round_robin(jobs)
    assert closed == ["a", "b"]


# Runs.


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_each_run_is_bit_for_bit_what_it_is_alone(tmp_path, alone, engine):
    threads = torch.get_num_threads()
    runs = fit_seeds(lambda seed: ragged(seed=seed), seeds=SEEDS, out=tmp_path, engine=engine, **QUICK)
    assert [run.config.seed for run in runs] == list(SEEDS)
    assert len({tuple(states(tmp_path / f"seed-{seed}").values()) for seed in SEEDS}) == 3
    for seed in SEEDS:
        same(tmp_path / f"seed-{seed}", alone[engine] / f"seed-{seed}")
    assert torch.get_num_threads() == threads
    assert [folder.path.name for folder in run_folders(tmp_path)] == ["seed-0", "seed-1", "seed-2"]


def test_forked_processes_of_several_runs_do_not_mix(tmp_path, alone):
    settings = QUICK | {"processes": 2}
    fit_seeds(lambda seed: ragged(seed=seed), seeds=SEEDS[:2], out=tmp_path, engine="serial", **settings)
    for seed in SEEDS[:2]:
        same(tmp_path / f"seed-{seed}", alone["serial"] / f"seed-{seed}")


def test_the_summary_says_that_other_processes_shared_the_device_if_whoever_started_them_does(monkeypatch):
    monkeypatch.setenv("PEFLL_SHARED", "1")
    run = fit(ragged(), **QUICK)
    assert run.summary["timing"].startswith("shared the device with other processes")
    two = fit_seeds(ragged(), seeds=[0, 1], **QUICK)
    assert two[0].summary["timing"] == run.summary["timing"]
    monkeypatch.setenv("PEFLL_SHARED", "0")
    assert fit(ragged(), **QUICK).summary["timing"] == "alone"


def test_the_summary_says_that_the_time_was_shared(tmp_path, alone):
    fit_seeds(ragged(), seeds=[4, 5], out=tmp_path, **QUICK)
    summary = RunFolder(tmp_path / "seed-4").summary()
    assert summary["lockstep"] == 2
    assert summary["timing"] == "took turns with 1 other run; seconds are of this run's own turns, but wall_seconds"
    assert own_seconds(summary)
    single = RunFolder(alone["vector"] / "seed-0").summary()
    assert own_seconds(single)
    assert (single["lockstep"], single["timing"]) == (1, "alone")
    # It stays true when the run is extended alone.
    fit(ragged(), seed=4, out=tmp_path / "seed-4", **QUICK | {"rounds": 15})
    assert RunFolder(tmp_path / "seed-4").summary()["lockstep"] == 2


def test_turns_are_short_compared_with_runs(monkeypatch):
    """Nobody runs to the end while the others wait."""
    monkeypatch.setattr(pipeline, "STRETCH_SECONDS", 0.0)  # one round a turn, however fast the machine is
    order = []
    advance = VectorEngine.advance
    monkeypatch.setattr(VectorEngine, "advance", lambda self, *rest: order.append(self.seed) or advance(self, *rest))
    fit_seeds(ragged(), seeds=SEEDS, engine="vector", **QUICK)
    assert order == list(SEEDS) * QUICK["rounds"]


def failing(monkeypatch, engine, seed: int, at: int, action) -> None:
    """Let one seed's engine do something when it comes to a round."""
    advance = engine.advance

    def instead(self, server, first, rounds):
        if self.seed == seed and first <= at < first + rounds:
            action()
        return advance(self, server, first, rounds)

    monkeypatch.setattr(engine, "advance", instead)


def diverge() -> None:
    raise PefllError("training diverged")


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, alone):
    failing(monkeypatch, VectorEngine, seed=1, at=7, action=diverge)
    with pytest.raises(pefll.RunsFailed, match=r"^1 of 3 .* seed 1: training diverged \[PEFLL-T126\]$") as failed:
        fit_seeds(lambda seed: ragged(seed=seed), seeds=SEEDS, out=tmp_path, engine="vector", **QUICK)
    assert [run.config.seed for run in failed.value.runs] == [0, 2]
    assert list(failed.value.errors) == [1]
    for seed in (0, 2):
        same(tmp_path / f"seed-{seed}", alone["vector"] / f"seed-{seed}")
    assert RunFolder(tmp_path / "seed-1").summary() is None


def test_real_divergence_of_the_vector_engine_is_each_runs_own(tmp_path):
    wild = QUICK | {"client_lr": 1e30, "client_clip": 0.0}
    with pytest.raises(pefll.RunsFailed, match="PEFLL-T126") as failed:
        fit_seeds(ragged(), "fedavg", seeds=[0, 1], engine="vector", **wild)
    assert failed.value.runs == []
    assert {seed: error.code for seed, error in failed.value.errors.items()} == {0: "PEFLL-E012", 1: "PEFLL-E012"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_saves_all_and_resuming_goes_on_with_all(tmp_path, monkeypatch, alone, number):
    with monkeypatch.context() as patch:
        failing(patch, VectorEngine, seed=1, at=7, action=lambda: os.kill(os.getpid(), number))
        with pytest.raises(Stopped) as stopped:
            fit_seeds(lambda seed: ragged(seed=seed), seeds=SEEDS, out=tmp_path, engine="vector", **QUICK)
    assert stopped.value.signal == number
    assert 0 < stopped.value.round < 12
    for seed in SEEDS:
        assert RunFolder(tmp_path / f"seed-{seed}").summary() is None
        assert max(states(tmp_path / f"seed-{seed}")) >= f"round-{stopped.value.round:08d}"
    fit_seeds(lambda seed: ragged(seed=seed), seeds=SEEDS, out=tmp_path, engine="vector", **QUICK)
    for seed in SEEDS:
        assert max(states(tmp_path / f"seed-{seed}").items()) == max(states(alone["vector"] / f"seed-{seed}").items())
        assert history(tmp_path / f"seed-{seed}") == history(alone["vector"] / f"seed-{seed}")


@pytest.mark.parametrize("method", ["pefll", "local"])
def test_stopping_while_a_run_is_tested_keeps_its_rounds(tmp_path, monkeypatch, method):
    settings = QUICK if method == "pefll" else {"epochs": 1, "processes": 1}
    evaluated = summary.client_scores

    def interrupted(*given):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluated(*given)

    with monkeypatch.context() as patch:
        patch.setattr(summary, "client_scores", interrupted)
        with pytest.raises(Stopped) as stopped:
            fit(ragged(), method, out=tmp_path, **settings)
    assert stopped.value.round == settings.get("rounds", 0)
    assert RunFolder(tmp_path).summary() is None
    assert fit(ragged(), method, out=tmp_path, **settings).summary["rounds"] == settings.get("rounds", 0)


def test_a_second_ctrl_c_ends_all_at_once_and_leaves_torch_as_it_was(monkeypatch):
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    failing(monkeypatch, SerialEngine, seed=1, at=2, action=twice)
    with pytest.raises(KeyboardInterrupt) as ended:
        fit_seeds(ragged(), seeds=SEEDS, engine="serial", **QUICK)
    assert not isinstance(ended.value, Stopped)
    assert torch.get_num_threads() == threads
    assert signal.getsignal(signal.SIGINT) is handler


def test_settings_that_cannot_be_run_leave_no_folder(tmp_path):
    with pytest.raises(PefllError, match="PEFLL-E008"):
        fit_seeds(ragged(), seeds=SEEDS, out=tmp_path / "r", **QUICK | {"clients_per_round": 100})
    with pytest.raises(PefllError, match="PEFLL-T104"):
        fit_seeds(ragged(), seeds=[1, 1], out=tmp_path / "r", **QUICK)
    with pytest.raises(PefllError, match="PEFLL-T104"):
        fit_seeds(ragged(), seeds=[], out=tmp_path / "r", **QUICK)
    assert not (tmp_path / "r").exists()


def test_a_folder_that_one_seed_may_not_have_keeps_the_others_from_starting(tmp_path):
    (tmp_path / "seed-1").mkdir()
    (tmp_path / "seed-1" / "thesis.tex").write_text("...")
    with pytest.raises(PefllError, match="PEFLL-T109"):
        fit_seeds(ragged(), seeds=SEEDS, out=tmp_path, **QUICK)
    assert os.listdir(tmp_path) == ["seed-1"]


def test_local_needs_no_rounds_here_either():
    runs = fit_seeds(ragged(), "local", seeds=[0, 1], epochs=1)
    assert [run.summary["rounds"] for run in runs] == [0, 0]


def test_federations_of_several_seeds_share_their_samples():
    one, two = federations_of([Config(data="digits", clients=8, seed=seed) for seed in (0, 1)], None)
    assert one.x.data_ptr() == two.x.data_ptr()
    assert one.fingerprint() != two.fingerprint()
    copies: dict = {}
    moved = [federation.to("cpu", copies) for federation in (one, two)]
    # x and y once; rows, offset and count for each.
    assert sum(copy.shape == one.x.shape and copy.dtype == one.x.dtype for copy in copies.values()) == 1
    assert len(copies) == 2 + 2 * 3
    for before, after in zip((one, two), moved, strict=True):
        assert after.fingerprint() == before.fingerprint()


def test_time_that_is_up_is_no_first_ctrl_c():
    with stop_signals(seconds=0.0) as received:
        while not received:
            time.sleep(0.001)
        assert received == [TIME_IS_UP]
        signal.raise_signal(signal.SIGINT)
        assert received == [TIME_IS_UP, signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with stop_signals(seconds=0.05) as received:
        pass
    time.sleep(0.1)
    assert received == []  # nobody waits for it any more


def test_the_first_signal_is_told_and_who_ignores_the_terminals_end_goes_on():
    heard = Queue()
    before = signal.getsignal(signal.SIGHUP)
    with stop_signals(tell=heard.put) as received:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # a terminal's end comes by way of the shell, too
        assert received == [signal.SIGHUP]
        assert heard.get(timeout=10) == STOPPING
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert heard.empty()
    assert signal.getsignal(signal.SIGHUP) is before
    with stop_signals() as received:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)  # of whoever has asked to stop, and closes the terminal
        assert received == [signal.SIGINT]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as with `nohup`
    try:
        with stop_signals() as received:
            signal.raise_signal(signal.SIGHUP)
            assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_somebody_is_told_of_each_run_as_it_ends(tmp_path):
    data, told = ragged(), []
    config = Config(data="arrays", model="mlp", rounds=4, clients_per_round=2, settings={"local_steps": 2})
    specs = [resolve(Config(**vars(config) | {"seed": seed}), data, tmp_path / f"seed-{seed}") for seed in SEEDS]
    runs = fitting.train_all(specs, ended=lambda spec, run: told.append((spec.config.seed, run)))
    assert [seed for seed, _ in told] == list(SEEDS)
    assert [run for _, run in told] == runs
    assert all(spec.folder.summary() for spec in specs)


def test_two_ends_of_a_terminal_at_once_are_one():
    """The second handler runs in the middle of the first, right after that has seen that nothing came before."""

    class Interrupted(Signals):
        inside = False

        def __bool__(self):
            if not self.inside:
                self.inside = True
                self.note(signal.SIGHUP, None)
                return False
            return len(self) > 0

    signals = Interrupted()
    signals.note(signal.SIGHUP, None)  # no KeyboardInterrupt
    assert set(signals) == {signal.SIGHUP}
    with pytest.raises(KeyboardInterrupt):
        signals.note(signal.SIGINT, None)
