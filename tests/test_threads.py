"""Threads that use one process at once get what each would get alone."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.errors import LiveError
from torch import nn
from torch.nn.modules import module as torch_module

import pefll
from pefll import process, randomness
from pefll.data.federation import Samples
from pefll.engines.serial import SerialEngine
from pefll.engines.settings import EngineSettings
from pefll.hardware import forward_flops
from pefll.methods import Problem, build_method
from pefll.models import Network
from pefll.models.fused import fused
from pefll.models.head import last_linear
from pefll.ops import recorded
from pefll.progress import monitor
from pefll.record import RunFolder
from tests.faults.threads import at_once, digits, fitting, in_pairs, mixed, new_clients, personalising, trained
from tests.federations import problem_of, ragged

meeting: Callable[[], Any] | None = None


@torch.fx.wrap
def meet(x):
    """Return x, once whoever it is that is met has come too; a function that a record of a network keeps."""
    if meeting is not None:
        meeting()
    return x


class Meeting(nn.Module):
    """A network that meets others of other threads between its layers."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first, self.last, self.plain = nn.Linear(6, 4), nn.Linear(4, 3), plain
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        if self.plain and bool((x > 1e9).any()):  # looks at the numbers, so that it cannot be recorded
            return x
        return meet(self.last(meet(F.relu(self.first(x))))) + self.shift


@pytest.fixture
def met(monkeypatch):
    """Let two threads meet."""
    barrier = threading.Barrier(2, timeout=30)
    return lambda wait=barrier.wait: monkeypatch.setattr("tests.test_threads.meeting", wait)


def both(function: Callable[[int], Any]) -> list[Any]:
    """Return what two threads return that do something at the same time."""
    barrier = threading.Barrier(2, timeout=30)

    def one(number: int) -> Any:
        barrier.wait()
        return function(number)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


@pytest.mark.parametrize("plain", [False, True])
def test_two_threads_call_a_network_with_different_weights(plain, met):
    network, x = Network(Meeting(plain)), torch.randn(5, 6)
    thetas = [network.init(seed, "model") for seed in range(2)]
    alone = [network(theta, x) for theta in thetas]
    kept = {name: value.clone() for name, value in network.module.state_dict().items()}
    met()
    together = both(lambda number: network(thetas[number], x))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    assert all(torch.equal(value, network.module.state_dict()[name]) for name, value in kept.items())


def test_a_network_is_called_within_itself_and_under_transforms(met):
    network, x = Network(Meeting(plain=False)), torch.randn(5, 6)
    thetas = torch.stack([network.init(seed, "model") for seed in range(3)])
    outer, inner = network(thetas[0], x), network(thetas[1], x)
    seen = []

    def again() -> None:
        met(None)
        seen.append(network(thetas[1], x))

    met(again)
    assert torch.equal(network(thetas[0], x), outer)
    assert torch.equal(seen[0], inner)
    met(again)  # a second copy is there by now, and its numbers are ordinary ones, under whatever it was made
    mapped = torch.vmap(torch.func.grad(lambda theta: network(theta, x).square().sum()))(thetas)
    met(None)
    by_hand = torch.func.grad(lambda theta: network(theta, x).square().sum())(thetas[2])
    torch.testing.assert_close(mapped[2], by_hand)


def test_a_copy_that_is_made_while_others_are_mapped_has_ordinary_tensors(met):
    class Scaled(Meeting):
        def __init__(self) -> None:
            super().__init__(plain=True)
            self.factor = torch.full((3,), 2.0)  # not a buffer: copied with the module

        def forward(self, x):
            return self.last(meet(self.first(x))) * self.factor

    network, x = Network(Scaled()), torch.randn(5, 6)
    thetas = torch.stack([network.init(seed, "model") for seed in range(3)])

    def again() -> None:
        met(None)
        network(thetas[1], x)

    met(again)
    torch.vmap(torch.func.grad(lambda theta: network(theta, x).sum()))(thetas)
    expected = network(thetas[0], x)
    met(again)
    assert torch.equal(network(thetas[0], x), expected)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(one.module.factor) for one in network._idle)


def test_a_network_that_was_used_can_be_copied_and_sent():
    class Keeps(nn.Linear):
        def forward(self, x):
            self.kept = super().forward(x)
            return self.kept

    network, x = Network(Keeps(6, 3)), torch.randn(2, 6)
    theta = network.init(0, "model").requires_grad_()
    expected = network(theta, x)
    assert torch.equal(copy.deepcopy(network)(theta, x), expected)
    linear = Network(nn.Linear(6, 3))
    linear(theta, x)
    assert torch.equal(pickle.loads(pickle.dumps(linear))(theta, x), expected)


def test_a_failing_network_names_the_users_line_with_the_weights_of_the_call():
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x)

    network = Network(Picky())
    theta = network.init(0, "model").double()
    with pytest.raises(RuntimeError, match=r"5x7.*6x3"):  # and nothing of types: the weights are the call's
        network(theta, torch.zeros(5, 7, dtype=torch.float64))
    assert network(theta, torch.zeros(5, 6, dtype=torch.float64)).dtype == torch.float64


def test_modules_of_other_threads_compute_while_one_is_recorded(met):
    """torch replaces `nn.Module.__call__` in the whole process meanwhile."""
    other, x = nn.Sequential(nn.Linear(6, 3), nn.ReLU()), torch.randn(2, 6)
    expected, found = other(x), []
    for record in (fused, last_linear):
        met(lambda: found.append(in_a_thread(lambda: other(x))))

        class Waits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(6, 3)

            def forward(self, x):
                if meeting is not None:
                    meeting()
                return self.layer(x)

        record(Waits())
        met(None)
    assert len(found) == 2
    assert all(torch.equal(each, expected) for each in found)


def test_two_recordings_at_once_leave_torch_as_it_was():
    call, get = nn.Module.__call__, nn.Module.__getattr__

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            time.sleep(0.05)
            return F.relu(self.layer(x))

    def one(number: int) -> nn.Module:
        time.sleep(0.02 * number)
        module = Slow()
        return fused(module) is not module

    try:
        assert both(one) == [True, True]
        assert (nn.Module.__call__, nn.Module.__getattr__) == (call, get)
    finally:
        nn.Module.__call__, nn.Module.__getattr__ = call, get


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


def test_what_one_thread_rehearses_or_overwrites_is_no_other_ones():
    with recorded.rehearsal(), recorded.overwriting():
        assert len(list(recorded.rehearsed(range(9)))) == recorded.REHEARSED
        assert recorded.may_overwrite()
        assert len(in_a_thread(lambda: list(recorded.rehearsed(range(9))))) == 9
        assert not in_a_thread(recorded.may_overwrite)
    assert not recorded.may_overwrite()


def test_counting_operations_hooks_into_nobodys_modules(monkeypatch):
    hooks = []
    monkeypatch.setattr(Meeting, "forward", lambda self, x: hooks.append(bool(_global_hooks())) or self.first(x))
    assert forward_flops(Problem(Network(Meeting(plain=True)), (6,), 3, 1)) == 2 * 32 * 6 * 4
    assert not any(hooks)


def _global_hooks() -> dict[int, Any]:
    return torch_module._global_forward_pre_hooks | torch_module._global_forward_hooks


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
