"""Schedules of learning rates: their factors, where they act, on which engines, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.core.schedules import cosine, parse_schedule, step
from pefll.engines import cuda_queue
from pefll.engines.device_queue import NO_INPUTS
from pefll.engines.round_plan import CONSTANT, UNIFORM, RoundPlan
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import METHODS, build_method
from pefll.training.resolve import round_plan_of
from tests.engines.test_engines import SETTINGS
from tests.federations import flat, problem_of, ragged

SCHEDULED = [name for name, method in METHODS.items() if method.client_rates or method.server_rates]
QUICK = {"clients_per_round": 2, "local_steps": 2, "eval_every": 2, "processes": 1, "device": "cpu"}


def tenth(round_: int) -> float:
    return 0.1


def test_factors():
    assert [cosine(4)(t) for t in (0, 2, 4, 9)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert [parse_schedule("cosine 0.2", "lr_schedule", 4)(t) for t in (0, 2, 4)] == pytest.approx([1.0, 0.6, 0.2])
    assert [parse_schedule("step 3 0.5", "lr_schedule", 9)(t) for t in (0, 2, 3, 6)] == [1.0, 1.0, 0.5, 0.25]
    assert parse_schedule("constant", "lr_schedule", 4) is None
    assert round_plan_of(pefll.runs.config.Config(), pefll.FedAvg()) is UNIFORM
    assert UNIFORM.rates(7) == CONSTANT


def test_every_method_with_rounds_says_which_rates_follow_a_schedule():
    assert set(METHODS) - set(SCHEDULED) == {"local"}
    for name in SCHEDULED:
        rates = {*METHODS[name].client_rates, *METHODS[name].server_rates}
        assert rates <= pefll.methods.hyperparameters(name).keys()


def state(name: str, make: type, settings: dict, plan: RoundPlan, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    federation = ragged(clients=5)
    method = build_method(name, problem_of(federation), SETTINGS[name] | settings)
    engine = make(federation, method, 1, 3, dtype=dtype, plan=plan)
    try:
        return flat(engine.advance(engine.start(), 0, 2))
    finally:
        engine.close()


# The vector engine agrees with the serial one: see `test_engines_agree`.
VARIATIONS = ("pefll-prior", "pefll-plus")


@pytest.mark.parametrize("make", [SerialEngine, pytest.param(VectorEngine, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIATIONS)) for name in SCHEDULED]
)
def test_a_factor_multiplies_the_rates_that_a_method_names(name, make):
    """A constant factor of a half is half the rates."""
    method, defaults = METHODS[name], pefll.methods.hyperparameters(name) | SETTINGS[name]
    half = RoundPlan(lambda t: 0.5, (lambda t: 0.5) if method.server_rates else None)
    halved = {rate: 0.5 * defaults[rate] for rate in (*method.client_rates, *method.server_rates)}
    found, wanted = state(name, make, {}, half), state(name, make, halved, RoundPlan())
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert (found - state(name, make, {}, RoundPlan())).abs().max() > 1e-6


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIATIONS)) for name in SCHEDULED]
)
def test_engines_agree(name):
    plan = RoundPlan(step(1, 0.3), cosine(3) if METHODS[name].server_rates else None)
    serial, vector = (state(name, make, {}, plan) for make in (SerialEngine, VectorEngine))
    torch.testing.assert_close(serial, vector, rtol=0, atol=1e-10)
    single = state(name, VectorEngine, {}, plan, torch.float32).double()
    torch.testing.assert_close(serial, single, rtol=0, atol=1e-3)


def test_workers_have_the_factor_of_the_round():
    federation = ragged(clients=5)
    method, states = build_method("fedavg", problem_of(federation), SETTINGS["fedavg"]), []
    for processes in (1, 2):
        engine = SerialEngine(federation, method, 1, 3, processes=processes, plan=RoundPlan(step(1, 1 / 3)))
        states.append(flat(engine.advance(engine.start(), 0, 3)))
        engine.close()
    assert torch.equal(*states)


def test_a_recorded_round_reads_what_is_filled_in_before_each_replay(monkeypatch):
    """Without a GPU: a graph whose replay does the round."""
    federation = ragged(clients=5)
    method = build_method("fedavg", problem_of(federation), SETTINGS["fedavg"])
    plan = RoundPlan(step(1, 0.5), None, lambda t, samples, size, rng: [t % 3, (t + 1) % 3])
    engine, read = VectorEngine(federation, method, 1, 2, plan=plan), []

    class Graph:
        def replay(self):
            read.append((int(graph.t), graph.given.clients.tolist(), float(graph.given.client_factor)))
            graph.t.add_(1)

    for name in ("wait_stream", "stream", "current_stream", "warm_up", "capture", "CUDAGraph"):
        owner = torch.cuda if hasattr(torch.cuda, name) else cuda_queue
        monkeypatch.setattr(owner, name, lambda *_: cuda_queue.nullcontext(), raising=False)
    stream = type("Stream", (), {"wait_stream": lambda *_: None})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    graph = cuda_queue._RoundGraph(engine, stream, engine.start())
    assert graph.given.server_factor is None
    graph.replay(graph.server, 3, 2)
    graph.replay(graph.server, 5, 1)
    assert read == [(3, [0, 1], 0.125), (4, [1, 2], 0.0625), (5, [2, 0], 0.03125)]
    constant = VectorEngine(federation, method, 1, 2)
    assert constant.inputs(3, 2) is NO_INPUTS
    engine.close(), constant.close()


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_a_resumed_run_has_the_same_bits(tmp_path, engine, monkeypatch):
    settings = QUICK | {"engine": engine, "lr_schedule": "cosine 0.1", "sampling": "samples"}

    class Quits(pefll.Callback):
        def on_evaluation(self, run, row):
            raise ValueError

    with pytest.raises(PefllError, match="PEFLL-T550"):
        pefll.fit(ragged(), "fedavg", rounds=6, out=tmp_path / "a", callbacks=[Quits()], **settings)
    again = pefll.fit(ragged(), "fedavg", rounds=6, out=tmp_path / "a", **settings)
    whole = pefll.fit(ragged(), "fedavg", rounds=6, **settings)
    assert torch.equal(flat(again.final), flat(whole.final))
    assert not torch.equal(flat(whole.final), flat(pefll.fit(ragged(), "fedavg", rounds=6, **QUICK).final))
    with pytest.raises(PefllError, match="PEFLL-R550"):
        pefll.fit(ragged(), "fedavg", rounds=8, out=tmp_path / "a", **settings)
    with pytest.raises(PefllError, match="PEFLL-R104"):
        pefll.fit(ragged(), "fedavg", rounds=6, out=tmp_path / "a", **settings | {"lr_schedule": "cosine"})


@pytest.mark.parametrize(
    ("schedule", "code"),
    [
        ("cosin", "PEFLL-A101"),
        ("cosine -1", "PEFLL-A550"),
        ("step 3", "PEFLL-A550"),
        ("step 0 0.5", "PEFLL-A550"),
        ("step 3 nan", "PEFLL-A550"),
        ("constant 2", "PEFLL-A550"),
        ("", "PEFLL-A101"),
        (3, "PEFLL-A008"),
        (lambda t: math.nan if t == 4 else 1.0, "round 4.*PEFLL-A553"),
        (lambda t: -0.1, "-0.1.*round 0.*PEFLL-A553"),
        (lambda t: math.inf, "PEFLL-A553"),
        (lambda t: "1", "PEFLL-A553"),
        (lambda t: 1 / (3 - t), "ZeroDivisionError.*PEFLL-A552|round 3.*PEFLL-A552"),
        ("tests.test_schedules:SCHEDULED", "PEFLL-A551"),
        ("tests.test_schedules:nobody", "PEFLL-A108"),
    ],
)
def test_a_schedule_that_cannot_be_used_is_refused_before_the_run(tmp_path, schedule, code):
    with pytest.raises(PefllError, match=code):
        pefll.fit(ragged(), "fedavg", rounds=6, lr_schedule=schedule, out=tmp_path / "r", **QUICK)
    assert not (tmp_path / "r").exists()


def test_a_method_without_such_a_rate_refuses_a_schedule():
    with pytest.raises(PefllError, match="PEFLL-S550"):
        pefll.fit(ragged(), "local", lr_schedule="cosine", epochs=1)
    with pytest.raises(PefllError, match="PEFLL-S550"):
        pefll.fit(ragged(), "fedavg", rounds=2, server_lr_schedule="cosine", **QUICK)


def test_a_function_has_a_name_in_the_config_and_numpys_numbers_are_numbers():
    run = pefll.fit(ragged(), "fedavg", rounds=2, lr_schedule=tenth, **QUICK)
    assert run.config.lr_schedule == "tests.test_schedules:tenth"
    named = pefll.fit(ragged(), "fedavg", rounds=2, lr_schedule="tests.test_schedules:tenth", **QUICK)
    array = pefll.fit(ragged(), "fedavg", rounds=2, lr_schedule=lambda t: np.float64(0.1), **QUICK)
    assert torch.equal(flat(run.final), flat(named.final))
    assert torch.equal(flat(run.final), flat(array.final))


@pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
def test_a_factor_of_zero_stops_scaffolds_clients(make):
    plan = RoundPlan(client_schedule=lambda t: 0.0)
    federation = ragged(clients=5)
    method = build_method("scaffold", problem_of(federation), SETTINGS["scaffold"])
    engine = make(federation, method, 1, 3, dtype=torch.float64, plan=plan)
    before = engine.start()
    after = engine.advance(before, 0, 1)
    engine.close()
    assert torch.equal(after.theta, before.theta)
    assert not after.variates.any()
