"""Threads that use one process at once get what each would get alone."""

from __future__ import annotations

import io
import multiprocessing
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.errors import LiveError

import pefll
from pefll.backend import recorded
from pefll.core import process, randomness
from pefll.core.progress import monitor
from pefll.data.samples import Samples
from pefll.engines.serial import SerialEngine
from pefll.engines.settings import EngineSettings
from pefll.methods import build_method
from pefll.runs.record import RunFolder
from tests.at_once import both, in_a_thread
from tests.faults.threads import at_once, digits, fitting, in_pairs, mixed, new_clients, personalising, trained
from tests.federations import problem_of, ragged


def test_threads_draw_their_own_first_weights():
    def draw(number: int) -> torch.Tensor:
        with randomness.initial_weights(number, "test"):
            time.sleep(0.02)
            first = torch.randn(3)
            time.sleep(0.02)
            return torch.cat([first, torch.randn(3)])

    alone = [draw(number) for number in range(2)]
    before = torch.random.get_rng_state()
    together = both(draw)
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    assert torch.equal(torch.random.get_rng_state(), before)


class _Open:
    """Stands for an engine."""


def settings() -> tuple[int, bool]:
    return torch.get_num_threads(), bool(torch.full((), 1e-38) * 0.1 == 0)


def test_every_thread_gets_its_settings_back():
    torch.set_num_threads(2)
    usual = settings()
    mine, theirs = _Open(), _Open()
    opened, closed = threading.Event(), threading.Event()

    def other() -> list[tuple[int, bool]]:
        found = [settings()]
        EngineSettings.take(theirs)
        found.append(settings())
        opened.set()
        assert closed.wait(30)
        found.append(settings())
        EngineSettings.give_back(theirs)
        return [*found, settings()]

    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(other)
        assert opened.wait(30)
        EngineSettings.take(mine)
        assert settings() == (1, True)
        EngineSettings.give_back(mine)
        assert settings() == usual  # though another thread's engine is open
        closed.set()
        assert there.result(30) == [usual, (1, True), (1, True), usual]
    EngineSettings.take(mine)

    def fresh() -> list[tuple[int, bool]]:
        """Begin to use torch while another thread has set it."""
        EngineSettings.take(theirs)
        found = [settings()]
        EngineSettings.give_back(theirs)
        return [*found, settings()]

    assert in_a_thread(fresh) == [(1, True), usual]
    EngineSettings.give_back(mine)
    assert settings() == usual


def test_engines_of_float32_and_float64_are_open_in_two_threads():
    first, second = _Open(), _Open()
    EngineSettings.take(first, "float64")
    try:
        in_a_thread(lambda: (EngineSettings.take(second), EngineSettings.give_back(second)))
        with pytest.raises(pefll.PefllError) as refused:
            in_a_thread(lambda: EngineSettings.take(second, "tf32"))
        assert refused.value.code == "PEFLL-T001"
    finally:
        EngineSettings.give_back(first)


def test_warm_up_and_overwriting_hold_for_one_thread():
    with recorded.warm_up(), recorded.overwriting():
        assert len(list(recorded.few_in_warm_up(range(9)))) == recorded.WARM_UP_STEPS
        assert recorded.may_overwrite()
        assert len(in_a_thread(lambda: list(recorded.few_in_warm_up(range(9))))) == 9
        assert not in_a_thread(recorded.may_overwrite)
    assert not recorded.may_overwrite()


def test_read_only_arrays_are_taken_without_a_change_of_the_warnings():
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    x.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        federation = pefll.federation_from_arrays(x, np.arange(6) % 2, np.arange(6) % 2)
        assert warnings.filters == before
    del x
    assert sorted(federation.x.flatten().tolist()) == list(range(12))
    assert Samples(x=federation.x.numpy(), y=np.zeros(6, dtype=np.int64), classes=1)


def test_workers_of_one_engine_hold_no_pipe_of_another():
    """They would not end with their own engine, and never if the process is killed."""
    federation = ragged()
    method = build_method("fedavg", problem_of(federation), {"local_steps": 1})
    first, second = (SerialEngine(federation, method, 0, 2, processes=2) for _ in "ab")
    try:
        began = time.monotonic()
        first.close()
        assert time.monotonic() - began < 4  # it is 5 seconds until they are killed
        second.advance(second.start(), 0, 1)
    finally:
        second.close()


def test_a_run_folder_is_free_though_another_threads_processes_go_on(tmp_path: Path):
    """A process that was forked meanwhile has a copy of every open file, and so of the lock."""
    folder = RunFolder(tmp_path / "run")
    with folder.held():
        folder.config_file.touch()
        other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        other.start()
    try:
        with folder.held():
            pass
    finally:
        other.kill()
        other.join()


def test_bars_of_two_threads_on_one_terminal(monkeypatch):
    terminal = Console(file=io.StringIO(), force_terminal=True)

    def show(number: int) -> str:
        with monitor(terminal, f"job {number}", 3) as watch:
            watch.at(1)
            time.sleep(0.1)
            watch.at(3)
            return "shown"

    assert both(show) == ["shown", "shown"]
    monkeypatch.setattr(terminal, "set_live", _refuse)  # as older versions of rich do for the second one
    assert show(3) == "shown"


def _refuse(_: object) -> bool:
    raise LiveError("Only one live display may be active at once")


def test_no_process_is_forked_in_the_middle_of_a_recording():
    """It would find the lock taken, and torch's functions replaced, for good."""
    federation = ragged()
    method = build_method("fedavg", problem_of(federation), {"local_steps": 1})
    holding, forked = threading.Event(), threading.Event()

    def hold() -> bool:
        with process.lock:
            holding.set()
            return forked.wait(0.5)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        assert holding.wait(30)
        engine = SerialEngine(federation, method, 0, 2, processes=2)
        forked.set()
        assert not held.result(30)
        engine.close()


@pytest.mark.parametrize("model", ["tiny", "cnn"])
def test_personal_models_made_by_threads_are_those_of_one(model):
    federation = digits()
    run = trained(federation, "pefll", "serial", model=model)
    figures = at_once(personalising(run, new_clients(federation)), count=200, threads=8).figures()
    assert figures == {"tried": 200, "accepted_silently": 0, "tracebacks": 0}


@pytest.mark.parametrize("method", ["pefll", "knn-per"])
def test_threads_evaluate_predict_load_and_personalise_at_once(method, tmp_path: Path):
    federation = digits()
    run = trained(federation, method, "serial", out=tmp_path / "run")
    figures = at_once(mixed(run, new_clients(federation), tmp_path / "run"), count=48, threads=8).figures()
    assert figures == {"tried": 48, "accepted_silently": 0, "tracebacks": 0}


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_two_trainings_in_two_threads_are_what_each_is_alone(engine):
    jobs = fitting(digits(), ("pefll", "fedavg"), (engine,))
    assert in_pairs(jobs, repeats=2).figures() == {"tried": 8, "accepted_silently": 0, "tracebacks": 0}


def test_two_trainings_with_processes_of_their_own_in_two_threads():
    jobs = fitting(digits(), ("pefll",), ("serial",), processes=2)
    assert in_pairs(jobs, repeats=1).figures() == {"tried": 2, "accepted_silently": 0, "tracebacks": 0}


def test_seeds_are_trained_in_a_thread_beside_another_training():
    federation = digits()
    asked: dict[str, Any] = {"model": "tiny", "rounds": 2, "clients_per_round": 3, "local_steps": 3, "device": "cpu"}

    def seeds(_: int) -> list[torch.Tensor]:
        runs = pefll.fit_seeds(federation, "fedavg", seeds=[0, 1], engine="vector", **asked)
        return [run.server.theta for run in runs]

    alone = seeds(0)
    assert all(torch.equal(*pair) for together in both(seeds) for pair in zip(alone, together, strict=True))
