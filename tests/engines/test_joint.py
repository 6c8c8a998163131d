"""Runs whose rounds are done together are the runs they would be alone. Here on a CPU; see test_cuda.py for a GPU."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

from pefll import training
from pefll.checkpoint import latest
from pefll.config import Config
from pefll.engines import joint, vector
from pefll.engines.joint import join, why_not
from pefll.engines.vector import VectorEngine, put_back
from pefll.errors import PefllError
from pefll.fitting import RunsFailed, fit, fit_seeds, fit_together
from pefll.lockstep import Stopped
from pefll.methods import METHODS, build_method
from pefll.methods.contract import everyone
from pefll.preparing import Order
from pefll.record import RunFolder
from pefll.tree import leaves, map_tree, named_leaves
from tests.engines.test_engines import SETTINGS
from tests.federations import dealt, flat, problem_of, ragged

SEEDS = (0, 1, 5)
QUICK = {
    "rounds": 12, "clients_per_round": 2, "local_steps": 2, "eval_every": 3, "checkpoint_every": 5,
    "engine": "vector", "precision": "float64", "device": "cpu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(joint, "DEVICES", {"cuda", "cpu"})


@pytest.fixture
def joints(monkeypatch):
    """Everything that runs were joined with, in a list."""
    made = []
    real = joint.Joint.__init__
    monkeypatch.setattr(joint.Joint, "__init__", lambda self, *rest: made.append(self) or real(self, *rest))
    return made


@pytest.fixture
def engines_of():
    """Makes an engine for each seed, and closes all of them in the end."""
    opened = []

    def make(name, model="mlp", shape=(6,)):
        data = dealt(SEEDS, shape, pixels=len(shape) == 3)
        for seed in SEEDS:
            method = build_method(name, problem_of(data[seed], model), SETTINGS[name])
            opened.append(VectorEngine(data[seed], method, seed, 3, "cpu", torch.float64))
        return opened[-len(SEEDS) :]

    yield make
    for engine in reversed(opened):
        engine.close()


def launched(engines, states, firsts, lasts):
    """Let engines agree and launch in turns, as the training loop does; return states, rounds under way, and ends."""
    wishes = zip(engines, states, firsts, lasts, strict=True)
    talks = [engine.agree(state, first, last) for engine, state, first, last in wishes]
    ends = {}
    for _ in range(2):  # all have said what they want, then all have heard it
        for place, talk in enumerate(talks):
            try:
                next(talk)
            except StopIteration as end:
                ends.setdefault(place, end.value)
    after = []
    for place, (engine, state, first) in enumerate(zip(engines, states, firsts, strict=True)):
        with engine.turn():
            after.append(engine.launch(state, first, ends[place] - first))
    return [state for state, _ in after], [later for _, later in after], [ends[place] for place in range(len(after))]


@pytest.mark.parametrize(
    ("name", "model", "shape"),
    [*((name, "mlp", (6,)) for name in METHODS), ("pefll", "lenet", (1, 16, 16)), ("fedavg", "cnn", (2, 8, 8))],
)
def test_each_run_is_what_it_is_alone(name, model, shape, engines_of):
    alone, engines = engines_of(name, model, shape), engines_of(name, model, shape)
    wanted = [flat(engine.advance(engine.start(), 0, 4)) for engine in alone]
    together = join(engines)
    states = [engine.start() for engine in engines]
    before = [flat(state) for state in states]
    given = states
    for first, last in ((0, 3), (3, 4)):  # a second stretch goes on where the first one ended
        states, under_way, _ = launched(engines, states, [first] * 3, [last] * 3)
        for later in under_way:
            later.wait()
    assert together.rounds == 4
    for state, expected in zip(states, wanted, strict=True):
        torch.testing.assert_close(flat(state), expected, rtol=0, atol=1e-12)
    assert [engine.ledger for engine in engines] == [engine.ledger for engine in alone]
    if METHODS[name].trains_in_rounds:
        assert len({float(flat(state).sum()) for state in states}) == 3
    assert all(torch.equal(flat(state), then) for state, then in zip(given, before, strict=True))


def test_they_go_as_far_as_all_want_to(engines_of):
    engines = engines_of("fedavg")
    together = join(engines)
    states, _, ends = launched(engines, [engine.start() for engine in engines], [0] * 3, [3, 2, 5])
    assert ends == [2, 2, 2]
    assert together.rounds == 2
    launched(engines, states, [2] * 3, [3, 4, 5])
    assert together.rounds == 3


def test_runs_at_different_rounds_go_on_alone_until_they_meet(engines_of):
    engines, alone = engines_of("fedavg"), engines_of("fedavg")
    together = join(engines)
    states = [engine.start() for engine in engines]
    states[1], _ = engines[1].launch(states[1], 0, 2)  # it was resumed further on, say
    states, _, ends = launched(engines, states, [0, 2, 0], [2, 4, 2])
    assert (together.rounds, ends) == (0, [2, 4, 2])
    states, _, ends = launched(engines, states, [2, 4, 2], [4, 5, 5])
    assert (together.rounds, ends) == (0, [4, 5, 5])
    states[0], _ = engines[0].launch(states[0], 4, 1)
    states, _, _ = launched(engines, states, [5] * 3, [7] * 3)
    assert together.rounds == 2
    for engine, state in zip(alone, states, strict=True):
        torch.testing.assert_close(flat(state), flat(engine.advance(engine.start(), 0, 7)), rtol=0, atol=1e-12)


def test_a_reply_that_is_not_finite_is_told_to_its_own_run(engines_of):
    engines, alone = engines_of("fedavg"), engines_of("fedavg")
    join(engines)
    states = [engine.start() for engine in engines]
    states[1] = map_tree(lambda leaf: torch.full_like(leaf, torch.nan), states[1])
    states, under_way, _ = launched(engines, states, [0] * 3, [2] * 3)
    with pytest.raises(PefllError, match="NaN or infinity in training at round 0"):
        under_way[1].wait()
    for i in (0, 2):
        under_way[i].wait()
        torch.testing.assert_close(flat(states[i]), flat(alone[i].advance(alone[i].start(), 0, 2)), rtol=0, atol=1e-12)


def test_what_must_be_the_same_for_all(engines_of):
    def pair(**changes):
        one, two = engines_of("fedavg")[:2]
        for name, value in changes.items():
            setattr(two, name, value)
        return one, two

    method = engines_of("fedavg")[1].method
    assert why_not(pair()) == ""
    assert why_not(pair(dtype=torch.float32)) == "device"
    assert why_not(pair(clients_per_round=2)) == "clients per round"
    assert why_not(pair(clients_per_round=0, federation=ragged())) == "clients per round"
    assert why_not(pair(federation=ragged())) == "samples"
    assert why_not(pair(federation=dealt((1,), clients=9)[1])) == "samples"
    assert why_not(pair(method=replace(method, client_lr=0.5))) == "settings"
    assert why_not(pair(method=engines_of("knn-per")[1].method)) == "settings"
    wide = replace(method, problem=problem_of(dealt((1,))[1], torch.nn.Sequential(torch.nn.Linear(6, 4))))
    assert why_not(pair(method=wide)) == "model"


def test_what_cannot_be_joined_is_left_as_it_is(monkeypatch, engines_of):
    engines = engines_of("fedavg")
    assert join(engines[:1]) is None
    engines[1].clients_per_round = 2
    assert join(engines) is None
    assert all(engine.company is None for engine in engines)
    monkeypatch.setattr(joint, "DEVICES", {"cuda"})
    assert join(engines_of("fedavg")) is None


def test_runs_that_do_not_ask_the_same_are_told_so_and_no_thread_stays(engines_of):
    engines = engines_of("fedavg")
    join(engines)

    class Curious(type(engines[0].method)):
        def round(self, server, cohort):
            cohort.run(self.train, everyone(server.theta))
            return super().round(server, cohort)

    states = [engine.start() for engine in engines]
    engines[2].method = Curious(*vars(engines[2].method).values())
    threads, ledger = threading.active_count(), engines[0].ledger.copy()
    with pytest.warns(UserWarning, match="do not ask the same"):
        after, _, _ = launched(engines, states, [0] * 3, [1] * 3)
    assert threading.active_count() == threads
    assert engines[0].ledger.since(ledger).exchanges == 1  # of its own round alone
    assert not torch.equal(flat(after[0]), flat(states[0]))


def test_an_error_of_one_run_is_its_own(monkeypatch, joints):
    data, real = dealt(SEEDS), METHODS["fedavg"].round

    def fails(self, server, cohort):
        if cohort.seed == SEEDS[1] and int(cohort.round) == 7:
            raise PefllError("enough")
        return real(self, server, cohort)

    monkeypatch.setattr(METHODS["fedavg"], "round", fails)
    with pytest.warns(UserWarning, match="side by side, not as one: enough"), pytest.raises(RunsFailed) as failed:
        fit_seeds(data.get, "fedavg", seeds=SEEDS, **QUICK)
    assert str(failed.value).startswith("1 of 3 runs failed: seed 1: enough")
    assert joints[0].rounds > 0


def test_who_is_left_when_another_ends_in_the_middle_goes_on_alone(engines_of):
    engines, alone = engines_of("fedavg"), engines_of("fedavg")
    together = join(engines)
    states = [engine.start() for engine in engines]
    talks = [engine.agree(state, 0, 2) for engine, state in zip(engines, states, strict=True)]
    for _ in range(2):
        for talk in talks:
            next(talk, None)
    engines[0].launch(states[0], 0, 2)
    engines[0].close()
    after, _ = engines[1].launch(states[1], 0, 2)
    torch.testing.assert_close(flat(after), flat(alone[1].advance(alone[1].start(), 0, 2)), rtol=0, atol=1e-12)
    assert together.rounds == 2


# What a GPU is told, with streams that only note who waits for whom; test_cuda.py has the rest.


class Stream:
    def __init__(self, name, waits):
        self.name, self.waits = name, waits

    def wait_stream(self, other):
        self.waits.append((self.name, other.name))

    def synchronize(self):
        pass


@pytest.fixture
def with_streams(monkeypatch):
    """Gives engines streams, and joins them; what they record is done once, where it is recorded."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current", []))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    for module in (vector, joint):
        monkeypatch.setattr(module, "recording", lambda *arguments: contextlib.nullcontext())

    def prepare(engines):
        waits, together = [], join(engines)
        states = [engine.start() for engine in engines]
        together.stream = Stream("all", waits)
        for name, engine in zip("abc", engines, strict=True):
            engine.stream = Stream(name, waits)
            monkeypatch.setattr(engine, "turn", contextlib.nullcontext)
        return engines, together, states, waits

    return prepare


@pytest.fixture
def recorded(engines_of, with_streams):
    return with_streams(engines_of("pefll"))


@pytest.mark.parametrize("branches", [True, False])
def test_a_recorded_round_forks_and_joins_at_every_exchange(recorded, engines_of, monkeypatch, branches):
    monkeypatch.setattr(joint, "BRANCHES", branches)
    engines, together, states, waits = recorded
    before, ledgers = [flat(state) for state in states], [engine.ledger.copy() for engine in engines]
    monkeypatch.setattr(joint, "recording", lambda *_: waits.clear() or contextlib.nullcontext())
    graph = together._recorded(states, 5)
    during = list(waits)
    fork, rejoin = [(name, "all") for name in "abc"], [("all", name) for name in "abc"]
    assert during == ((fork + rejoin) * 4 if branches else [])  # at the start, and after each of three exchanges
    assert (together.refused, together.differs) == ("", [])
    assert graph.bad.tolist() == [-1] * 3
    assert int(graph.t) == 6
    assert all(torch.equal(flat(state), then) for state, then in zip(states, before, strict=True))
    for engine, made, ledger, cost in zip(engines_of("pefll"), graph.servers, ledgers, graph.costs, strict=True):
        started = engine.ledger.copy()
        wanted = engine.advance(engine.start(), 5, 1)
        torch.testing.assert_close(flat(made), flat(wanted), rtol=0, atol=1e-12)
        started.add(ledger)
        assert vars(engine.ledger.since(started)) == vars(cost)
    assert [engine.ledger for engine in engines] == ledgers


class AdamsKernel:
    """Stands in for the kernel that writes a state in place; tests/ops has that one, which takes its time here."""

    @staticmethod
    def available(parameters):
        return True

    @staticmethod
    def splits(vector, parts):
        return False

    @staticmethod
    def adam(parameters, along, first, second, *numbers, in_place):
        (gradient,) = along
        after = parameters - 0.1 * gradient, 0.9 * first + gradient, 0.9 * second + gradient.square()
        return tuple(map(torch.Tensor.copy_, (parameters, first, second), after)) if in_place else after


def test_a_recorded_round_writes_large_states_where_they_are_and_copies_the_rest(engines_of, with_streams, monkeypatch):
    for module in ("client_axis", "vectors"):
        monkeypatch.setattr(f"pefll.methods.adam.{module}", AdamsKernel)
    copied = []

    def noting(old, new):
        names = [
            name for (name, there), value in zip(named_leaves(old), leaves(new), strict=True) if there is not value
        ]
        copied.append(names)
        return put_back(old, new)

    for module in (vector, joint):
        monkeypatch.setattr(module, "put_back", noting)
    engines, together, states, _ = with_streams(engines_of("pefll"))
    before = [flat(state) for state in states]
    alone = [vector._RoundGraph(engine, state) for engine, state in zip(engines, states, strict=True)]
    joined = together._recorded(states, 0)
    assert copied == [["step"]] * 6  # alone and joined; the step's number is all that is not Adam's
    for engine, state, then, one, other in zip(engines, states, before, alone, joined.servers, strict=True):
        wanted, *_ = engine._round(state, torch.zeros((), dtype=torch.int64))
        assert torch.equal(flat(one.server), flat(wanted))
        torch.testing.assert_close(flat(other), flat(wanted), rtol=0, atol=1e-12)
        assert torch.equal(flat(state), then)


def test_what_would_differ_or_cannot_be_recorded_goes_on_alone(recorded, monkeypatch):
    engines, together, states, _ = recorded
    monkeypatch.setattr(joint._JointGraph, "_differences", lambda self, after: ["embedder of seed 1 by 1e-08", "more"])
    ledgers = [engine.ledger.copy() for engine in engines]
    with pytest.warns(UserWarning, match=r"not as one: they would not .* alone \(embedder of seed 1 by 1e-08\)$"):
        after, _, ends = launched(engines, states, [0] * 3, [2, 3, 4])
    assert (together.rounds, ends) == (0, [2, 2, 2])
    assert together.differs == ["embedder of seed 1 by 1e-08", "more"]
    assert len({float(flat(state).sum()) for state in after}) == 3
    assert all(engine.ledger.exchanges == then.exchanges + 6 for engine, then in zip(engines, ledgers, strict=True))
    _, _, ends = launched(engines, after, [2] * 3, [3, 4, 5])  # nobody is asked any more
    assert ends == [3, 4, 5]


def test_bits_that_differ_are_found(recorded):
    engines, together, states, _ = recorded
    graph = together._recorded(states, 0)
    alone = [engine._round(server, graph.t)[0] for engine, server in zip(engines, graph.servers, strict=True)]
    assert graph._differences(alone) == []
    alone[1] = alone[1]._replace(embedder=alone[1].embedder + 1e-9)
    (found,) = graph._differences(alone)
    assert found.startswith("embedder of seed 1 by 1.0e-09")


# Whole runs.


def test_whole_runs_are_what_they_are_alone(tmp_path, joints):
    data = dealt(SEEDS)
    runs = fit_seeds(data.get, seeds=SEEDS, out=tmp_path, **QUICK)
    (together,) = joints
    assert together.rounds == QUICK["rounds"]
    for run in runs:
        seed = run.config.seed
        alone = fit(data[seed], seed=seed, out=tmp_path / f"alone-{seed}", **QUICK)
        torch.testing.assert_close(flat(run.final), flat(alone.final), rtol=0, atol=1e-12)
        torch.testing.assert_close(flat(run.server), flat(alone.server), rtol=0, atol=1e-12)
        for key in ("best_round", "rounds", "bytes_down", "bytes_up"):
            assert run.summary[key] == alone.summary[key]
        mine, theirs = (RunFolder(tmp_path / name).history() for name in (f"seed-{seed}", f"alone-{seed}"))
        assert [row["round"] for row in mine] == [row["round"] for row in theirs] == [3, 6, 9, 12]
        assert [row["seen"]["per_sample"] for row in mine] == [row["seen"]["per_sample"] for row in theirs]
        assert run.summary["lockstep"] == 3


def test_stopped_runs_go_on_together(tmp_path, joints):
    data, launch = dealt(SEEDS), VectorEngine.launch

    def interrupted(self, server, first, rounds):
        if self.seed == SEEDS[1] and first <= 7 < first + rounds:
            os.kill(os.getpid(), signal.SIGINT)
        return launch(self, server, first, rounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VectorEngine, "launch", interrupted)
        with pytest.raises(Stopped):
            fit_seeds(data.get, seeds=SEEDS, out=tmp_path, **QUICK)
    runs = fit_seeds(data.get, seeds=SEEDS, out=tmp_path, **QUICK)
    assert [together.rounds > 0 for together in joints] == [True, True]
    for run in runs:
        alone = fit(data[run.config.seed], seed=run.config.seed, **QUICK)
        torch.testing.assert_close(flat(run.final), flat(alone.final), rtol=0, atol=1e-12)
        assert run.summary["bytes_up"] == alone.summary["bytes_up"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_signal_while_rounds_are_waited_for_stops_all_at_the_same_round(tmp_path, joints, monkeypatch, seed):
    data, settle = dealt(SEEDS), training._settle

    def interrupted(stretch, config, *rest):
        if config.seed == seed and stretch.last >= 4:  # where a GPU's runs spend nearly all their time
            os.kill(os.getpid(), signal.SIGINT)
        return settle(stretch, config, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_settle", interrupted)
        with pytest.raises(Stopped):
            fit_seeds(data.get, seeds=SEEDS, out=tmp_path, **QUICK)
    done = {latest(tmp_path / f"seed-{seed}" / "checkpoints", lambda damage: None).round for seed in SEEDS}
    assert len(done) == 1
    fit_seeds(data.get, seeds=SEEDS, out=tmp_path, **QUICK)
    assert joints[1].rounds == QUICK["rounds"] - done.pop() > 0


def test_a_run_that_was_further_on_already_is_the_same_too(tmp_path, joints):
    data = dealt(SEEDS)
    fit(data[1], seed=1, out=tmp_path / "seed-1", **QUICK | {"rounds": 6})
    runs = fit_seeds(data.get, seeds=SEEDS, out=tmp_path, **QUICK)
    assert len(joints) == 1
    for run in runs:
        alone = fit(data[run.config.seed], seed=run.config.seed, **QUICK)
        torch.testing.assert_close(flat(run.final), flat(alone.final), rtol=0, atol=1e-12)


def test_one_run_that_diverges_leaves_the_others_alone(monkeypatch, joints):
    data = dealt(SEEDS)
    start = VectorEngine.start

    def poisoned(self):
        state = start(self)
        return map_tree(lambda leaf: leaf * torch.inf, state) if self.seed == SEEDS[1] else state

    with monkeypatch.context() as patch:
        patch.setattr(VectorEngine, "start", poisoned)
        with pytest.raises(RunsFailed, match=r"1 of 3 runs failed: seed 1: .*NaN") as failed:
            fit_seeds(data.get, "fedavg", seeds=SEEDS, **QUICK)
    (together,) = joints
    assert 0 < together.rounds < QUICK["rounds"]  # the others went on, each by itself
    assert [run.config.seed for run in failed.value.runs] == [0, 5]
    for run in failed.value.runs:
        alone = fit(data[run.config.seed], "fedavg", seed=run.config.seed, **QUICK)
        torch.testing.assert_close(flat(run.final), flat(alone.final), rtol=0, atol=1e-12)


def test_runs_with_other_settings_or_samples_take_turns_as_before(joints):
    data = dealt(SEEDS)
    base = Config(data="arrays", method="fedavg", model="mlp", rounds=2, clients_per_round=2, engine="vector")
    orders = [
        Order(replace(base, seed=seed, settings={"client_lr": lr}), data[seed], None)
        for seed, lr in ((0, 0.1), (1, 0.2))
    ]
    assert len(fit_together(orders)) == 2
    assert len(fit_seeds(lambda seed: ragged(seed=seed), "fedavg", seeds=[0, 1], **QUICK)) == 2
    assert len(fit_seeds(data.get, "fedavg", seeds=[0, 1], **QUICK | {"engine": "serial", "processes": 1})) == 2
    assert joints == []


def test_leaves_that_cross_the_door_are_plain_tensors(engines_of):
    engines = engines_of("pefll")
    together = join(engines)
    reach = together._reach

    def looking(asked, t):
        for exchange in asked:
            for argument in exchange.arguments:
                assert not any(torch._C._functorch.is_functorch_wrapped_tensor(leaf) for leaf in leaves(argument.value))
        return reach(asked, t)

    together._reach = looking
    launched(engines, [engine.start() for engine in engines], [0] * 3, [1] * 3)
    assert together.rounds == 1
