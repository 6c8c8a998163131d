"""Three ways to reach the clients, one result."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest
import torch

from pefll.backend import optim, recorded
from pefll.core.errors import PefllError
from pefll.data.assembly import assemble
from pefll.data.samples import TEST, Samples
from pefll.engines.cohort import Ledger
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import METHODS, Problem, build_method
from pefll.methods.contract import each, everyone
from pefll.models import CharLSTM, Network
from pefll.training.evaluation import client_scores
from pefll.training.fitting import fit
from tests.federations import flat, problem_of, ragged

SETTINGS = {
    "pefll": {"local_steps": 3, "batch_size": 4, "descriptor_batch": 4, "descriptor_size": 5, "hypernetwork": "S"},
    "fedavg": {"local_steps": 3, "batch_size": 4},
    "local": {"epochs": 2, "batch_size": 4},
    "per-fedavg": {"variant": "hf", "batch_size": 4, "personal_steps": 2},
    "fedrep": {"head_epochs": 2, "new_epochs": 3, "batch_size": 4},
    "pfedme": {"local_rounds": 3, "new_epochs": 2, "batch_size": 4},
    "knn-per": {"local_steps": 3, "batch_size": 4, "few_neighbours": 2, "many_neighbours": 4, "scale": 3.0},
    "pfedhn": {"local_steps": 3, "batch_size": 4, "embedding_size": 5, "hypernetwork": "S", "new_rounds": 3},
    "pefll-prior": {"local_steps": 3, "batch_size": 4, "descriptor_size": 5, "hypernetwork": "S"},
    "pefll-plus": {"local_steps": 3, "batch_size": 4, "descriptor_size": 5, "hypernetwork": "S"},
    "fedprox": {"local_steps": 3, "batch_size": 4},
    "scaffold": {"local_steps": 3, "batch_size": 4},
    "ditto": {"global_steps": 2, "personal_steps": 3, "batch_size": 4, "new_epochs": 2},
    "apfl": {"mixed_steps": 3, "batch_size": 4, "new_epochs": 2, "alpha_lr": 0.1},
    "fedper": {"local_steps": 3, "batch_size": 4, "new_epochs": 2},
    "lg-fedavg": {"local_steps": 3, "batch_size": 4, "new_epochs": 2},
    "fedbabu": {"local_steps": 3, "batch_size": 4, "tune_epochs": 2},
    "odpfl-hn": {"local_steps": 3, "batch_size": 4, "descriptor_batch": 4, "descriptor_size": 5, "hypernetwork": "S"},
}
# What is compared in the paper's tables, and variations of it. Other methods use no operation that these do not use.
BASELINES = ("fedavg", "local", "per-fedavg", "fedrep", "pfedme", "knn-per", "pfedhn")
OF_THE_PAPER = {*BASELINES, "pefll", "pefll-prior", "pefll-plus"}
LATER = ("fedprox", "scaffold", "ditto", "apfl", "fedper", "lg-fedavg", "fedbabu", "odpfl-hn")


def slow_beyond_the_paper(argument: str, but: Collection[str] = (), also: Collection[str] = ()):
    """Parametrize a test with all methods but some. A faster test must cover those that are slow.

    Slow are the methods that are not of the paper, and the methods of `also`.
    """
    names = sorted(set(METHODS) - set(but))
    fast = OF_THE_PAPER - set(also)
    return pytest.mark.parametrize(
        argument, [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]
    )


LENET, CNN, FEATURES = (1, 16, 16), (2, 8, 8), (6,)
CASES = [
    ("pefll", "lenet", LENET, "convnet"),
    ("pefll", "lenet", LENET, "convnet-unlabeled"),
    ("pefll", "cnn", CNN, "convnet"),
    ("pefll", "cnn", CNN, "mlp-unlabeled"),
    ("pefll", "mlp", FEATURES, "mlp"),
    ("pefll", "mlp", FEATURES, "linear"),
    ("fedavg", "lenet", LENET, ""),
    ("fedavg", "mlp", FEATURES, ""),
    ("local", "cnn", CNN, ""),
    ("local", "mlp", FEATURES, ""),
    *((name, "mlp", FEATURES, "") for name in ("per-fedavg", "fedrep", "pfedme", "knn-per", "pfedhn", "pefll-prior")),
    *((name, "cnn", CNN, "") for name in ("per-fedavg", "fedrep", "pfedme", "knn-per", "pfedhn", "pefll-prior")),
    # `engines_agree` of `pefll check-method` is the faster one.
    *(pytest.param(name, "mlp", FEATURES, "", marks=pytest.mark.slow) for name in LATER),
    *(pytest.param(name, "cnn", CNN, "", marks=pytest.mark.slow) for name in LATER),
    *(("pefll-plus", model, shape, "") for model, shape in (("mlp", FEATURES), ("cnn", CNN), ("lenet", LENET))),
]


def small(shape):
    return ragged(clients=6, shape=shape, sizes=(1, 3, 6, 11), seen=4, pixels=len(shape) == 3)


def settings(method: str, embedding: str = "") -> dict[str, object]:
    return SETTINGS[method] | ({"embedding": embedding} if embedding else {})


def travel(engine, rounds: int = 3):
    """Train, then make and score everybody's model: state [S], models [n, D], scores [n, 4]."""
    method = engine.method
    server = engine.advance(engine.start(), 0, rounds)
    models = {}
    with torch.no_grad():
        for ids, cohort in engine.cohorts(np.arange(engine.federation.num_clients)):
            models |= dict(zip(ids.tolist(), method.personalize(server, cohort).clone(), strict=True))
    scores = client_scores(engine, method, server, np.arange(engine.federation.num_clients), TEST)
    ledger = engine.ledger
    engine.close()
    return flat(server), torch.stack([models[i] for i in range(len(models))]), torch.from_numpy(scores), ledger


@pytest.mark.parametrize(("method", "model", "shape", "embedding"), CASES)
def test_the_engines_agree(method, model, shape, embedding):
    federation = small(shape)
    learner = build_method(method, problem_of(federation, model), settings(method, embedding))
    given = {"seed": 1, "clients_per_round": 3, "dtype": torch.float64}
    serial = travel(SerialEngine(federation, learner, **given))
    pair = travel(SerialEngine(federation, learner, processes=2, **given))
    vector = travel(VectorEngine(federation, learner, **given))
    for one, two in zip(serial[:3], pair[:3], strict=True):
        assert torch.equal(one, two)
    for one, two in zip(serial[:3], vector[:3], strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-8)
    assert serial[3] == pair[3] == vector[3]
    start = flat(SerialEngine(federation, learner, **given).start())
    if method != "local":
        assert (serial[0] - start).abs().max() > 1e-5  # something was learned, so there was something to agree on


def test_the_engines_agree_on_text():
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(4), 9)
    split = np.tile([0, 0, 0, 0, 0, 1, 2, 2, 2], 4).astype(np.int8)
    samples = Samples(x=rng.integers(0, 7, (36, 5)), y=rng.integers(0, 7, 36), classes=7, tokens=True)
    federation = assemble(samples, owner, split, 3, "text")
    problem = Problem(Network(CharLSTM((5,), 7, embedding=3, hidden=4)), (5,), 7, 4, tokens=True)
    learner = build_method("pefll", problem, settings("pefll"))
    given = {"seed": 1, "clients_per_round": 2, "dtype": torch.float64}
    serial, vector = (
        travel(SerialEngine(federation, learner, **given)),
        travel(VectorEngine(federation, learner, **given)),
    )
    for one, two in zip(serial[:3], vector[:3], strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", ["pefll", "fedavg"])
def test_rounds_in_one_go_or_one_by_one_are_the_same_bytes(method):
    federation = small(FEATURES)
    learner = build_method(method, problem_of(federation), settings(method))
    for make in (SerialEngine, VectorEngine):
        engine = make(federation, learner, seed=1, clients_per_round=3)
        together = engine.advance(engine.start(), 0, 4)
        single = engine.start()
        for t in range(4):
            single = engine.advance(single, t, 1)
        assert torch.equal(flat(together), flat(single))
        engine.close()


def test_every_round_has_other_clients_and_never_unseen_ones():
    federation = ragged(clients=30, sizes=(2,), seen=20)
    engine = SerialEngine(federation, build_method("fedavg", problem_of(federation), {}), 0, 5)
    drawn = [tuple(engine._sample(t).tolist()) for t in range(40)]
    engine.close()
    assert len(set(drawn)) > 35
    assert {client for cohort in drawn for client in cohort} == set(range(20))
    assert all(len(set(cohort)) == 5 for cohort in drawn)


def cohort_of(engine, ids, t: int):
    if isinstance(engine, VectorEngine):
        return engine._cohort(torch.tensor(ids), t, Ledger())
    return engine._cohort(np.array(ids), t, Ledger())


@pytest.mark.parametrize("make", [SerialEngine, VectorEngine])
@pytest.mark.parametrize("method", ["pefll", "fedavg", "local"])
def test_the_order_of_clients_does_not_matter(make, method):
    federation = small(FEATURES)
    learner = build_method(method, problem_of(federation), settings(method))
    engine = make(federation, learner, seed=1, clients_per_round=4, dtype=torch.float64)
    server = engine.start()
    ids, other = [0, 1, 2, 3], [2, 0, 3, 1]
    after = flat(learner.round(server, cohort_of(engine, ids, 0)))
    again = flat(learner.round(server, cohort_of(engine, other, 0)))
    torch.testing.assert_close(after, again, rtol=0, atol=1e-12)
    with torch.no_grad():
        models = learner.personalize(server, cohort_of(engine, ids, 0))
        turned = learner.personalize(server, cohort_of(engine, other, 0))
    torch.testing.assert_close(models[other], turned, rtol=0, atol=1e-12)
    assert method == "fedavg" or not torch.allclose(models, turned)
    engine.close()


@pytest.mark.parametrize("method", ["pefll", "fedavg", "local"])
def test_padding_does_not_matter(method):
    federation = small(FEATURES)
    learner = build_method(method, problem_of(federation), settings(method))
    engine = VectorEngine(federation, learner, seed=1, clients_per_round=2, dtype=torch.float64)
    server = engine.start()
    ids = torch.tensor([0, 1])  # of one and three samples
    outcomes = []
    for capacity in ((3, 2, 2), (11, 9, 9), (700, 4, 600)):
        cohort = engine._cohort(ids, 1, Ledger(), capacity)
        after = flat(learner.round(server, cohort))
        with torch.no_grad():
            theta = learner.personalize(server, cohort)
            scores = torch.stack(list(cohort.run(learner.predict, each(theta), split=TEST)))
        outcomes.append((after, theta, scores))
    for other in outcomes[1:]:
        for one, two in zip(outcomes[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-11)
    engine.close()


def test_small_evaluation_cohorts_give_the_same_as_large_ones(monkeypatch):
    federation = small(FEATURES)
    learner = build_method("pefll", problem_of(federation), settings("pefll"))
    given = {"seed": 1, "clients_per_round": 3, "dtype": torch.float64}
    whole = travel(VectorEngine(federation, learner, **given))
    monkeypatch.setattr("pefll.engines.vector.SAMPLES_AT_ONCE", {"cpu": 7})
    monkeypatch.setattr("pefll.engines.serial.CLIENTS_AT_ONCE", 2)
    for engine in (VectorEngine(federation, learner, **given), SerialEngine(federation, learner, **given)):
        sizes = [len(ids) for ids, _ in engine.cohorts(np.arange(6))]
        assert sum(sizes) == 6
        assert len(sizes) > 2
        parts = travel(engine)
        for one, two in zip(whole[:3], parts[:3], strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-8)


def test_a_round_of_fedavg_costs_a_model_down_and_a_model_and_a_count_up():
    federation = small(FEATURES)
    learner = build_method("fedavg", problem_of(federation), settings("fedavg"))
    size = learner.problem.model.size
    for make in (SerialEngine, VectorEngine):
        engine = make(federation, learner, seed=0, clients_per_round=3)
        server = engine.start()
        assert engine.ledger == Ledger(0, 0, 0)
        engine.advance(server, 0, 5)
        assert engine.ledger == Ledger(down=5 * 3 * 4 * size, up=5 * 3 * 4 * (size + 1), exchanges=5)
        before = engine.ledger.copy()
        client_scores(engine, learner, server, np.arange(6), TEST)
        assert engine.ledger == before  # evaluation is not part of the method's cost
        engine.close()


@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize("method", ["pefll", "fedavg", "local"])
def test_divergence_is_said_in_a_sentence(engine, method):
    huge = settings(method) | {"client_lr": 1e30, "client_clip": 0.0}
    with pytest.raises(PefllError, match=r"\bclient_lr\b.*PEFLL-E012"):
        fit(small(FEATURES), method, rounds=6, clients_per_round=3, engine=engine, processes=1, **huge)


def test_the_serial_engine_names_the_client_that_diverged():
    federation = small(FEATURES)
    federation.x[federation.indices(2)] = 1e30
    learner = build_method("fedavg", problem_of(federation), {"client_lr": 1e30, "client_clip": 0.0, "local_steps": 2})
    engine = SerialEngine(federation, learner, seed=0, clients_per_round=4)
    server = engine.start()._replace(theta=torch.full((learner.problem.model.size,), 1.0))
    with pytest.raises(PefllError, match=r"client \d .*\btrain\b.*\bround 7\b.*PEFLL-E012"):
        engine.advance(server, 7, 1)
    engine.close()


def test_too_many_or_no_clients_per_round():
    federation = small(FEATURES)
    learner = build_method("fedavg", problem_of(federation), {})
    for make in (SerialEngine, VectorEngine):
        with pytest.raises(PefllError, match=r"\b4 seen clients.*PEFLL-E008"):
            make(federation, learner, seed=0, clients_per_round=5)
        with pytest.raises(PefllError, match="PEFLL-E007"):
            make(federation, learner, seed=0, clients_per_round=-1)


@pytest.mark.parametrize("name", ["fedavg", "pefll"])
@pytest.mark.parametrize("client_lr", [1e3, 1e30])
def test_convolutions_that_diverge_are_noticed(name, client_lr):
    """Also where a CPU's pooling would pass over NaN."""
    federation = small(LENET)
    settings = SETTINGS[name] | {"client_lr": client_lr, "client_clip": 0.0, "local_steps": 12}
    engine = SerialEngine(federation, build_method(name, problem_of(federation, "lenet"), settings), 0, 3)
    server = engine.start()
    with pytest.raises(PefllError, match="PEFLL-E012"):
        engine.advance(server, 0, 3)
    engine.close()


def test_ledgers_add_up():
    total = Ledger(1, 2, 3)
    before = total.copy()
    total.add(Ledger(10, 20, 1), times=3)
    assert total == Ledger(31, 62, 6)
    assert total.since(before) == Ledger(30, 60, 3)
    assert before == Ledger(1, 2, 3)


@pytest.mark.parametrize("name", ["local", "fedrep", "pfedme", "pfedhn", "per-fedavg"])
def test_steps_by_number_are_the_steps_one_after_another(name, monkeypatch):
    """What a GPU records once and repeats, here repeated call by call: a step's number is a tensor then."""
    federation = small(FEATURES)
    method = build_method(name, problem_of(federation, "mlp"), SETTINGS[name])
    engine = VectorEngine(federation, method, seed=1, clients_per_round=3, dtype=torch.float64)
    server = engine.advance(engine.start(), 0, 2)

    def models() -> list[torch.Tensor]:
        return [method.personalize(server, cohort) for _, cohort in engine.cohorts(np.arange(6))]

    calls = []

    def repeat(step, state, times):
        calls.append(times)
        for i in range(times):
            state = step(torch.tensor(i), *state)
        return state

    wanted = models()
    monkeypatch.setattr(optim, "is_on_gpu", lambda theta: True)
    monkeypatch.setattr(recorded, "worth_capturing", lambda *_: True)
    monkeypatch.setattr(recorded, "repeat", repeat)
    for mine, theirs in zip(models(), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert calls


def test_a_client_finds_its_model_where_an_array_begins():
    # Of models with an odd number of parameters all but the first row of an array begin at an odd place.
    federation = small(FEATURES)
    engine = SerialEngine(
        federation,
        build_method("fedavg", problem_of(federation, "mlp"), SETTINGS["fedavg"]),
        seed=1,
        clients_per_round=3,
    )
    models, shared = torch.zeros(4, 7), torch.zeros(8)[1:]

    def where(client, own, everyones):
        return torch.tensor([own.data_ptr() % 64, everyones.data_ptr() % 64])

    places = engine.run_here(where, np.arange(4), 0, [each(models), everyone(shared)], {})
    engine.close()
    assert torch.equal(places, torch.zeros(4, 2, dtype=torch.int64))
