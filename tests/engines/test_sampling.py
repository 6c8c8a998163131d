"""Which clients a round has: built-in samplings and a user's function, the same on every engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.engines.cohort import sample_cohort, sampled
from pefll.engines.round_plan import UNIFORM, RoundPlan, by_samples
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from tests.engines.test_engines import SETTINGS
from tests.federations import flat, problem_of, ragged

QUICK = {"clients_per_round": 2, "local_steps": 1, "eval_every": 2, "processes": 1, "device": "cpu"}


def in_turn(round_, samples, size, rng):
    return [(round_ + place) % len(samples) for place in range(size)]


def test_uniform_sampling_is_as_ever():
    federation = ragged(clients=9)
    for t in range(5):
        wanted = sample_cohort(federation, 3, torch.tensor(t), 4).tolist()
        assert sampled(UNIFORM, federation, 3, t, 4).tolist() == wanted


def test_clients_with_more_samples_come_more_often():
    samples, plan = np.array([1, 2, 3, 4, 30]), RoundPlan(sampling=by_samples)
    times = np.zeros(5)
    for t in range(3000):
        chosen = plan.clients(0, t, samples, 1)
        times[chosen] += 1
    np.testing.assert_allclose(times / 3000, samples / samples.sum(), atol=0.03)
    two = plan.clients(0, 7, samples, 2)
    assert len(set(two.tolist())) == 2
    assert np.array_equal(two, plan.clients(0, 7, samples, 2))  # a function of seed and round
    assert sorted(plan.clients(0, 7, np.zeros(4, dtype=np.int64), 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("sampling", [by_samples, in_turn])
def test_engines_choose_the_same_clients(sampling):
    federation, states = ragged(clients=6), []
    method = build_method("pefll", problem_of(federation), SETTINGS["pefll"])
    for make in (SerialEngine, VectorEngine):
        engine = make(federation, method, 1, 3, dtype=torch.float64, plan=RoundPlan(sampling=sampling))
        states.append(flat(engine.advance(engine.start(), 0, 3)))
        engine.close()
    torch.testing.assert_close(*states, rtol=0, atol=1e-8)


def test_a_function_decides_who_trains():
    seen = []

    def told(round_, samples, size, rng):
        seen.append((round_, samples.tolist(), size, rng.integers(1 << 30)))
        return in_turn(round_, samples, size, rng)

    runs = [
        pefll.fit(ragged(clients=6), "fedavg", rounds=3, sampling=how, **QUICK)
        for how in (told, "tests.engines.test_sampling:in_turn", "uniform")
    ]
    assert torch.equal(flat(runs[0].final), flat(runs[1].final))
    assert not torch.equal(flat(runs[0].final), flat(runs[2].final))
    assert {t for t, *_ in seen} == {0, 1, 2}
    assert all(size == 2 for _, _, size, _ in seen)
    trained = [call for call in seen if call[1] == [1, 3, 5, 9]]
    assert {t for t, *_ in trained} == {0, 1, 2}
    assert len({number for t, _, _, number in trained if t}) == 2  # each round has its own generator
    assert all(counts == [1, 2, 3, 4] for _, counts, *_ in seen if counts != [1, 3, 5, 9])  # of the fingerprint


@pytest.mark.parametrize(
    ("sampling", "code"),
    [
        (lambda t, n, c, rng: [0, 0], "PEFLL-E551"),
        (lambda t, n, c, rng: [0], "PEFLL-E551"),
        (lambda t, n, c, rng: [0, 4], "PEFLL-E551"),
        (lambda t, n, c, rng: [-1, 0], "PEFLL-E551"),
        (lambda t, n, c, rng: [0.5, 1.0], "PEFLL-E551"),
        (lambda t, n, c, rng: None, "PEFLL-E551"),
        (lambda t, n, c, rng: [[0], [1, 2]], "PEFLL-E55"),
        (lambda t, n, c, rng: n[99], "IndexError.*PEFLL-E550"),
        ("weighted", "PEFLL-A101"),
        ("tests.engines.test_sampling:QUICK", "PEFLL-E552"),
        (7, "PEFLL-A008"),
    ],
)
def test_a_sampling_that_cannot_be_used_is_one_sentence(sampling, code):
    with pytest.raises(PefllError, match=code):
        pefll.fit(ragged(clients=6), "fedavg", rounds=2, sampling=sampling, **QUICK)
