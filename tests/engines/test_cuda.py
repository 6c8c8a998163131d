"""The vector engine as CUDA graphs. These need a GPU; everywhere else they are skipped."""

from __future__ import annotations

import gc
import weakref
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from benchmarks.lockstep import pictures as noise
from pefll.backend import recorded
from pefll.core.errors import PefllError
from pefll.core.schedules import cosine, step
from pefll.core.tree import leaves, named_leaves
from pefll.data import make_federation
from pefll.data.samples import VALIDATION
from pefll.engines.device_queue import queue_of
from pefll.engines.hardware import Hardware, place_data
from pefll.engines.round_plan import RoundPlan, by_samples
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import METHODS, build_method
from pefll.methods.pefll import PeFLL
from pefll.runs import checkpoint
from pefll.runs.config import Config
from pefll.runs.record import RunFolder
from pefll.training.evaluation import Evaluator, evaluate
from pefll.training.fitting import RunsFailed, fit, fit_seeds, runs_or_error, train_all
from pefll.training.resolve import resolve
from pefll.training.run import load
from tests.at_once import both
from tests.data.test_ranges import spoilt
from tests.engines.test_engines import SETTINGS
from tests.federations import flat, problem_of, ragged
from tests.test_schedules import SCHEDULED

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = {"device": "cuda", "precision": "float64", "local_steps": 3, "clients_per_round": 3}


@pytest.mark.parametrize("model", ["mlp", "lenet"])
@pytest.mark.parametrize("name", METHODS)
def test_a_graph_does_what_the_serial_engine_does(name, model):
    federation = ragged(shape=(1, 16, 16) if model == "lenet" else (6,), pixels=model == "lenet")
    method = build_method(name, problem_of(federation, model), SETTINGS[name])
    states, scores, costs = [], [], []
    for make, place in ((SerialEngine, {}), (VectorEngine, {"device": "cuda"})):
        engine = make(federation, method, seed=1, clients_per_round=3, dtype=torch.float64, **place)
        server = engine.start()
        server = engine.advance(server, 0, 2)
        server = engine.advance(server, 2, 3)  # a second stretch of the same graph
        states.append(flat(server))
        scores.append(evaluate(engine, method, server, 2))
        costs.append(vars(engine.ledger))
        engine.close()
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-8)
    assert scores[0].seen.per_sample == pytest.approx(scores[1].seen.per_sample, abs=1e-12)
    assert scores[0].unseen.loss == pytest.approx(scores[1].unseen.loss, abs=1e-6)
    assert costs[0] == costs[1]


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_graph_reads_the_rates_and_the_clients_of_each_round(name):
    federation, states = ragged(), []
    method = build_method(name, problem_of(federation), SETTINGS[name])
    plan = RoundPlan(cosine(5), step(2, 0.5) if method.server_rates else None, by_samples)
    for make, place in ((SerialEngine, {}), (VectorEngine, {"device": "cuda"})):
        engine = make(federation, method, seed=1, clients_per_round=3, dtype=torch.float64, **place, plan=plan)
        server = engine.advance(engine.start(), 0, 2)
        states.append(flat(engine.advance(server, 2, 3)))
        engine.close()
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-8)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
@pytest.mark.parametrize("model", ["mlp", "lenet"])
@pytest.mark.parametrize("name", ["local", "fedrep", "pfedme", "pfedhn"])
def test_steps_that_are_recorded_and_repeated_are_those_of_the_serial_engine(name, model, dtype, off, monkeypatch):
    monkeypatch.setattr(recorded, "MIN_REPETITIONS", 2)
    repeat, repeated = recorded.repeat, []
    monkeypatch.setattr(recorded, "repeat", lambda *arguments: repeated.append(arguments) or repeat(*arguments))
    federation = ragged(shape=(1, 16, 16) if model == "lenet" else (6,), pixels=model == "lenet")
    method = build_method(name, problem_of(federation, model), SETTINGS[name])
    clients = np.arange(federation.num_clients)
    made = []
    for make, place in ((SerialEngine, {}), (VectorEngine, {"device": "cuda"})):
        engine = make(federation, method, seed=1, clients_per_round=3, dtype=dtype, **place)
        with queue_of(engine).turn():
            server = engine.start()  # no rounds, which would have compiled the kernels before the recording
            models = torch.empty(len(clients), method.problem.model.size, dtype=dtype)
            for _ in range(2):  # a second time, after the first one's graphs are gone
                for ids, cohort in engine.cohorts(clients):
                    models[ids] = method.personalize(server, cohort).cpu()
        made.append(models)
        engine.close()
        assert bool(repeated) == (make is VectorEngine)
    torch.testing.assert_close(made[1], made[0], rtol=0, atol=off)


def test_an_engine_that_nobody_uses_any_more_is_not_freed_in_the_middle_of_a_capture():
    federation = ragged()
    method = build_method("pefll", problem_of(federation), {"local_steps": 3})

    def opened() -> VectorEngine:
        return VectorEngine(federation, method, seed=1, clients_per_round=3, device="cuda")

    gc.collect()
    gc.freeze()  # what is there now is not looked at again, so that the collector looks often at what is new
    old = opened()
    old.advance(old.start(), 0, 1)
    old.itself = old  # a cycle: freed by the collector and nobody else
    last, there = [old], weakref.ref(old)
    del old
    engine, lived = opened(), []
    real = engine.checked_round

    def forgetting(server, t, *given):
        if torch.cuda.is_current_stream_capturing():
            last.clear()
        after = real(server, t, *given)
        if torch.cuda.is_current_stream_capturing():
            lived.append(there() is not None)
        return after

    engine.checked_round = forgetting
    often = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        engine.advance(engine.start(), 0, 1)
    finally:
        gc.set_threshold(*often)
        gc.unfreeze()
    assert lived == [True]
    engine.close()
    gc.collect()
    assert there() is None


def test_capturing_changes_nothing():
    federation = ragged()
    method = build_method("pefll", problem_of(federation), {"local_steps": 3})
    engine = VectorEngine(federation, method, seed=1, clients_per_round=3, device="cuda", dtype=torch.float64)
    server = engine.start()
    before = flat(server)
    after = flat(engine.advance(server, 0, 4))
    assert torch.equal(flat(server), before)  # the state that was given is not written to
    engine.close()
    again = VectorEngine(federation, method, seed=1, clients_per_round=3, device="cuda", dtype=torch.float64)
    state = again.start()
    for t in range(4):
        state = again.advance(state, t, 1)
    again.close()
    torch.testing.assert_close(flat(state), after, rtol=0, atol=1e-10)


@pytest.mark.parametrize("precision", ["float64", "float32", "tf32", "bf16"])
def test_a_run_stopped_and_resumed_goes_on_where_it_was(tmp_path, precision):
    federation = pictures()
    settings = GPU | {"eval_every": 2, "precision": precision}
    whole = fit(federation, rounds=8, out=tmp_path / "whole", **settings)
    fit(federation, rounds=4, out=tmp_path / "parts", **settings)
    parts = fit(federation, rounds=8, out=tmp_path / "parts", **settings)
    assert torch.equal(flat(parts.final), flat(whole.final))
    assert whole.summary["engine"] == "vector"
    assert whole.summary["client_steps_per_second"] > 0


def test_a_loaded_run_is_evaluated_on_the_gpu(tmp_path):
    federation = pictures()
    trained = fit(federation, rounds=2, out=tmp_path / "run", **GPU)
    again = load(tmp_path / "run")
    assert again.evaluate(federation=federation) == trained.evaluate()


def same(one, other):
    """Whether two states have the same bits; compared where they are, as a hypernetwork is large."""
    return all(torch.equal(*pair) for pair in zip(leaves(one), leaves(other), strict=True))


def test_divergence_is_noticed():
    federation = ragged()
    with pytest.raises(PefllError, match="PEFLL-E012"):
        fit(federation, "fedavg", rounds=40, client_lr=1e30, client_clip=0.0, clients_per_round=3, device="cuda")


@pytest.mark.parametrize(
    ("method", "value"), [("pefll", 1e30), ("per-fedavg", 1e30), ("pefll", np.nan), ("fedavg", np.nan)]
)
def test_the_client_whose_data_it_is_gets_the_blame(method, value):
    federation = spoilt(value, 5)
    learner = build_method(method, problem_of(federation), {})
    engine = VectorEngine(federation, learner, 0, federation.num_clients, device="cuda")
    try:
        with queue_of(engine).turn(), pytest.raises(PefllError, match=rf"client {federation.name_of(5)}\b.*PEFLL-E012"):
            engine.advance(engine.start(), 0, 3)
    finally:
        engine.close()


@pytest.mark.parametrize("model", ["mlp", "lenet"])
@pytest.mark.parametrize("name", METHODS)
def test_a_recorded_evaluation_is_an_evaluation(name, model, monkeypatch):
    monkeypatch.setattr("pefll.engines.vector.SAMPLES_AT_ONCE", {"cuda": 60})  # several cohorts in one graph
    federation = ragged(shape=(1, 16, 16) if model == "lenet" else (6,), pixels=model == "lenet")
    method = build_method(name, problem_of(federation, model), SETTINGS[name])
    engine = VectorEngine(federation, method, seed=1, clients_per_round=3, device="cuda", dtype=torch.float64)
    with queue_of(engine).turn():
        evaluator = Evaluator(engine, method, VALIDATION)
        server = engine.start()
        pending = []
        for t in range(0, 20, 5):  # nothing is waited for, and later rounds go on beside each evaluation
            server, _ = engine.queue.launch(server, t, 5)
            state = engine.queue.snapshot(server)
            with engine.queue.beside():
                pending.append((evaluator.begin(state), state))
        for later, state in pending:
            wanted = evaluate(engine, method, state, VALIDATION)
            got = later.wait()
            assert later.done()
            assert later.seconds > 0
            assert (got.unseen is None) == method.trains_new_clients  # too much work for an evaluator
            for group in ("seen",) if got.unseen is None else ("seen", "unseen"):
                assert getattr(got, group)._asdict() == pytest.approx(getattr(wanted, group)._asdict(), abs=1e-9)
    engine.close()


@dataclass(frozen=True)
class ReadsOldState(PeFLL):
    """Reads the state it was given after Adam's step, as no method of the package does."""

    def step(self, server, d_hypernetwork, d_embedder, cohort):
        after = super().step(server, d_hypernetwork, d_embedder, cohort)
        return after._replace(hypernetwork=2 * after.hypernetwork - server.hypernetwork)


@pytest.mark.parametrize(
    "method", [PeFLL(local_steps=3), PeFLL(local_steps=3, server_average=0.9), ReadsOldState(local_steps=3)]
)
def test_a_state_that_is_written_in_place_is_the_one_made_step_by_step(method):
    federation = pictures()
    method = method.bind(problem_of(federation, "lenet"))
    engine = VectorEngine(federation, method, seed=1, clients_per_round=3, device="cuda", precision="tf32")
    # An engine that stays open would make the next tests fail.
    with closing(engine), queue_of(engine).turn():
        start = engine.start()
        before, state = engine.queue.snapshot(start), start
        for t in range(5):
            state, *_ = engine.checked_round(state, torch.full((), t, device="cuda"))
        recorded_, under_way = engine.queue.launch(start, 0, 5)
        under_way.wait()
        assert same(recorded_, state)
        assert same(start, before)


def test_a_snapshot_is_not_written_to():
    federation = ragged()
    method = build_method("pefll", problem_of(federation), {"local_steps": 3})
    engine = VectorEngine(federation, method, seed=1, clients_per_round=3, device="cuda", dtype=torch.float64)
    server, _ = engine.queue.launch(engine.start(), 0, 1)
    kept = engine.queue.snapshot(server)
    before = flat(kept)
    server, under_way = engine.queue.launch(server, 1, 3)
    under_way.wait()
    assert torch.equal(flat(kept), before)
    assert not torch.equal(flat(server), before)
    engine.close()


def pictures(seed=0):
    return ragged(shape=(1, 16, 16), pixels=True, seed=seed)


@pytest.mark.parametrize("seeds", [[0], [0, 1, 2]])
def test_what_is_written_while_rounds_go_on_is_the_state_of_its_round(tmp_path, seeds):
    settings = GPU | {"eval_every": 3, "checkpoint_every": 5, "precision": "tf32"}
    fit_seeds(pictures, seeds=seeds, out=tmp_path, rounds=14, **settings)
    for seed in seeds:
        folder = tmp_path / f"seed-{seed}" / "checkpoints"
        middle = checkpoint.load(folder / "round-00000010")
        short = fit(pictures(seed), seed=seed, rounds=10, **settings)
        for name, leaf in named_leaves(short.final):
            assert torch.equal(middle.tensors[f"server.{name}"], leaf.cpu()), (seed, name)
        history = [row["round"] for row in RunFolder(folder.parent).history()]
        assert history == [3, 6, 9, 12, 14]


@pytest.mark.parametrize("precision", ["float64", "float32", "tf32", "bf16"])  # the last three run our kernels
def test_runs_on_streams_of_their_own_are_what_they_are_alone(tmp_path, precision):
    settings = GPU | {"rounds": 12, "eval_every": 3, "checkpoint_every": 5, "precision": precision}
    runs = fit_seeds(pictures, seeds=[0, 1, 2], out=tmp_path, **settings)
    for seed, run in enumerate(runs):
        alone = fit(pictures(seed), seed=seed, **settings)
        assert torch.equal(flat(run.final), flat(alone.final))
        assert torch.equal(flat(run.server), flat(alone.server))
        assert run.summary["best_round"] == alone.summary["best_round"]
        assert run.summary["lockstep"] == 3
        assert "shared the device with 2 other runs" in run.summary["timing"]


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", ["pefll", "fedavg", "knn-per"])
def test_trainings_in_two_threads_are_what_one_is_alone(name, precision):
    settings = GPU | {"rounds": 20, "eval_every": 5, "precision": precision, "seed": 0}
    alone = fit(pictures(), name, **settings)
    for run in both(lambda _: fit(pictures(), name, **settings)):
        assert same(run.final, alone.final)
        assert same(run.server, alone.server)
        assert run.summary["best_round"] == alone.summary["best_round"]


def test_samples_are_on_the_device_once():
    one, copies = ragged(), {}
    placed = [place_data(Hardware(torch.device("cuda"), "vector", "tf32"), one, copies) for _ in range(3)]
    engines = [
        VectorEngine(data, build_method("fedavg", problem_of(one), {}), seed, 2, "cuda")
        for seed, data in enumerate(placed)
    ]
    assert len({engine.federation.x.data_ptr() for engine in engines}) == 1
    assert len({engine.queue.stream.cuda_stream for engine in engines}) == 3
    for engine in reversed(engines):
        engine.close()


def test_one_run_that_diverges_leaves_the_others_alone():
    federation = ragged()
    base = Config(
        method="fedavg", data="arrays", model="mlp", rounds=20, eval_every=4, clients_per_round=3, device="cuda"
    )
    specs = [
        resolve(Config(**vars(base) | {"seed": seed, "settings": changed}), federation)
        for seed, changed in enumerate([{}, {"client_lr": 1e30, "client_clip": 0.0}, {}])
    ]
    with pytest.raises(RunsFailed, match="PEFLL-T126") as failed:
        runs_or_error(specs, train_all(specs))
    assert [run.config.seed for run in failed.value.runs] == [0, 2]
    assert {seed: error.code for seed, error in failed.value.errors.items()} == {1: "PEFLL-E012"}


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_seeds_of_the_papers_network_are_bit_for_bit_what_they_are_alone(precision):
    # As in benchmarks/lockstep.py, so that whoever does both compiles the kernels once.
    samples = noise(12_000)
    settings = GPU | {"precision": precision, "model": "lenet", "rounds": 4, "clients_per_round": 5, "local_steps": 4}

    def data(seed):
        return make_federation(samples, partition="by-class 2", clients=100, seed=seed)

    runs = fit_seeds(data, seeds=[0, 1, 2], **settings | {"embedding": "convnet"})
    alone = [fit(data(seed), seed=seed, **settings | {"embedding": "convnet"}) for seed in range(3)]
    assert all(torch.equal(flat(a.final), flat(b.final)) for a, b in zip(runs, alone, strict=True))
    assert not torch.equal(flat(runs[0].final), flat(runs[1].final))
