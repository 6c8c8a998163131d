"""Synthetic worlds: the same seed gives the same clients, and their distribution is the one that is said."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal

import pefll
from pefll import PefllError
from pefll.data import TEST, TRAIN, VALIDATION
from pefll.data.synthetic import SyntheticClients, synthetic_world

STARTS = np.random.default_rng


def test_everything_follows_from_seed_index_and_draw():
    one, same = (synthetic_world(1, 2) for _ in range(2))
    assert one.federation(20, 0.25).fingerprint() == same.federation(20, 0.25).fingerprint()
    assert one.new_clients(5).fingerprint() == same.new_clients(5).fingerprint()
    others = [
        synthetic_world(1, 3).new_clients(5),
        synthetic_world(2, 2).new_clients(5),
        one.new_clients(5, draw=1),
        one.federation(5, 0.999),
    ]
    assert len({each.fingerprint() for each in [one.new_clients(5), *others]}) == 5


def test_shapes_of_a_federation():
    world = synthetic_world(0, features=4, classes=5, samples=(7, 2, 3))
    data = world.federation(20, 0.25)
    assert (data.num_seen, data.num_unseen, data.classes, data.input_shape) == (15, 5, 5, (4,))
    assert [set(data.count[split].tolist()) for split in (TRAIN, VALIDATION, TEST)] == [{7}, {2}, {3}]
    new = world.new_clients(6, test=11)
    assert (new.num_seen, new.num_unseen, set(new.count[TEST].tolist())) == (0, 6, {11})


def test_numbers_of_samples_may_differ():
    data = synthetic_world(0, samples=(100, 0, 1), spread=0.5).federation(4000)
    count = data.count[TRAIN].numpy()
    assert count.mean() == pytest.approx(100, abs=4 * 100 * (np.exp(0.25) - 1) ** 0.5 / 4000**0.5)
    assert np.log(count).std() == pytest.approx(0.5, abs=0.03)


def test_clients_have_the_moments_of_the_world():
    world, count = synthetic_world(3, alpha=0.7, beta=2.0, features=3, tastes=2, groups=2), 40_000
    clients = world.clients(count, STARTS(0))
    assert np.abs(clients.centre.std(axis=0) - 2).max() < 0.05
    assert np.abs(clients.centre.mean(axis=0)).max() < 4 * 2 / count**0.5
    # Weights are Q w, and w is m_g + α ε with each group equally likely.
    mean = np.einsum("cfs,s->cf", world.mixing, world.groups.mean(axis=0))
    apart = world.groups[0] - world.groups[1]
    covariance = 0.49 * np.eye(2) + np.outer(apart, apart) / 4
    variance = np.einsum("cfs,st,cft->cf", world.mixing, covariance, world.mixing)
    assert np.allclose(clients.weights.mean(axis=0), mean, atol=5 * variance.max() ** 0.5 / count**0.5)
    assert np.allclose(clients.weights.var(axis=0), variance, rtol=0.05)


def test_inputs_have_the_moments_of_the_client():
    world = synthetic_world(0, features=3)
    clients = SyntheticClients(np.zeros((2, 3, 4)), np.array([[1.0, 2, 3], [0, 0, 0]]))
    owner = np.repeat([0, 1], 50_000)
    x, _ = world.draw(clients, owner, STARTS(0))
    for client in range(2):
        own = x[owner == client]
        assert np.allclose(own.mean(axis=0), clients.centre[client], atol=0.02)
        assert np.allclose(np.cov(own.T), np.diag(np.arange(1, 4) ** -1.2), atol=0.02)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_accuracy_of_a_known_model_is_that_of_a_bivariate_normal(noise):
    """With two classes, truth and model are signs of two jointly normal scores."""
    world, count = synthetic_world(5, features=3, classes=2, noise=noise), 200_000
    clients = world.clients(1, STARTS(1))
    x, y = world.draw(clients, np.zeros(count, dtype=np.int64), STARTS(2))
    model = np.array([0.4, -1.0, 0.3, 0.2])
    truth = clients.weights[0, 1] - clients.weights[0, 0]
    both = np.stack([truth, model])
    mean = both[:, :3] @ clients.centre[0] + both[:, 3]
    covariance = both[:, :3] @ np.diag(np.arange(1, 4) ** -1.2) @ both[:, :3].T
    normal = multivariate_normal([0, 0], covariance)
    agree = normal.cdf(mean) + normal.cdf(-mean)  # both positive, or both negative
    expected = (1 - noise) * agree + noise / 2
    found = ((x @ model[:3] + model[3] > 0) == (y == 1)).mean()
    assert abs(found - expected) < 4 * 0.5 / count**0.5
    assert 0.55 < expected < 0.97


def test_more_difference_makes_one_model_worse():
    def of_one_model(alpha):
        data = synthetic_world(0, alpha=alpha, groups=1, noise=0.0).federation(60)
        run = pefll.fit(data, "fedavg", model="mlp", rounds=20, clients_per_round=20, engine="vector", device="cpu")
        return run.evaluate().seen.per_sample

    assert of_one_model(0.0) > of_one_model(2.0) + 0.1


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ({"classes": 1}, "D651"),
        ({"alpha": -1}, "D652"),
        ({"spread": -0.1}, "D652"),
        ({"samples": (3, 4)}, "D653"),
        ({"samples": (0, 1, 1)}, "A002"),
        ({"noise": 1.0}, "A007"),
        ({"features": 0}, "A002"),
        ({"beta": "much"}, "A004"),
    ],
)
def test_bad_input_is_one_sentence(bad, code):
    with pytest.raises(PefllError) as error:
        synthetic_world(0, **bad)
    assert error.value.code == f"PEFLL-{code}"


def test_bad_numbers_of_clients():
    world = synthetic_world(0)
    with pytest.raises(PefllError, match="clients is 0"):
        world.federation(0)
    with pytest.raises(PefllError, match="test is -1"):
        world.new_clients(3, -1)
