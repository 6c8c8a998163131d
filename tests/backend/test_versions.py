"""Every faster version computes what its reference does, over random shapes; a user's own loss is trained as it is."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pefll.backend  # noqa: F401 (registers the faster versions)
from pefll.backend import client_axis
from pefll.core import reference as references
from pefll.data.client import Batch
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import Problem, build_method
from pefll.methods.optim import SGD, Adam, Moments
from pefll.models import Network
from pefll.tasks import Classification
from tests.backend.test_kernels import DEVICE, EXAMPLES, interpreter, random  # noqa: F401 (fixture)
from tests.federations import flat, problem_of, ragged

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # see test_kernels.py

ALL = [
    (plain, version)
    for plain in references.references()
    if plain.__module__.startswith("pefll.")
    for version in references.versions_of(plain)
]


@contextmanager
def only_references():
    """Switch all faster versions off."""
    held = {plain: list(versions) for plain, versions in references._versions.items()}
    interpreted, client_axis.interpreted = client_axis.interpreted, False
    runs, client_axis._runs_kernels = client_axis._runs_kernels, lambda _: False
    for versions in references._versions.values():
        versions.clear()
    try:
        yield
    finally:
        client_axis.interpreted, client_axis._runs_kernels = interpreted, runs
        for plain, versions in held.items():
            references._versions[plain].extend(versions)


class Squares(Classification):
    """Cross-entropy, squared: a loss of a user's own."""

    def loss(self, output, y):
        return super().loss(output, y).square()


def some_batches(rng, problem, *axes, number=3):
    size, seed = rng.randint(1, 5), rng.randint(0, 99)
    x = random(*axes, number, size, *problem.input_shape, seed=seed)
    y = torch.randint(problem.classes, x.shape[: len(axes) + 2], generator=torch.Generator().manual_seed(seed))
    weight = torch.ones(y.shape)
    weight[..., 1:] = (random(*weight[..., 1:].shape, seed=seed + 1) > -1).float().cpu()
    return x, y.to(DEVICE), weight.to(DEVICE)


def some_problem(rng):
    inputs, classes = rng.randint(1, 6), rng.randint(2, 5)
    layers = [nn.Linear(inputs, rng.randint(1, 9)), nn.Tanh()]
    network = Network(nn.Sequential(*layers, nn.Linear(layers[0].out_features, classes)))
    task = rng.choice([Classification, Squares])(classes)
    return Problem(network, (inputs,), classes, 4, task=task)


def on_problem(call, mapped, many):
    """Return a case: `call` of a version, a problem, parameters, and a batch or (`many`) a list of them."""

    def case(rng):
        problem = some_problem(rng)
        axes = (rng.randint(1, 3),) if mapped else ()
        theta = 0.5 * random(*axes, problem.model.size, seed=rng.randint(0, 99))
        arrays = some_batches(rng, problem, *axes)

        def run(version):
            def one(theta, x, y, weight):
                batches = [Batch(x[i], y[i], weight[i]) for i in range(len(x))]
                return call(version, problem, theta, batches if many else batches[0])

            return (torch.vmap(one) if mapped else one)(theta, *arrays)

        return run

    return case


def steps_along(version, problem, theta, batches):
    sgd = SGD(torch.tensor(0.1, device=theta.device), 0.9, 0.01, 0.5, proximal=0.3)
    return version(lambda at, batch: torch.sin(at) * batch.weight.mean(), theta, batches, sgd)


def steps_on_loss(version, problem, theta, batches):
    steps, towards = torch.full((), 2, device=theta.device), torch.cos(theta)
    return version(problem.loss, theta, batches, SGD(0.1, 0.9, 0.01, 0.5, proximal=0.3), steps, towards)


def one_step(version, problem, theta, batches):
    return version(theta, torch.cos(theta), torch.sin(3 * theta), SGD(0.1, 0.9, 0.01, 0.5))


def loss(version, problem, theta, batch):
    return version(problem.task, problem.model(theta, batch.x), batch)


def vjp(version, problem, theta, batch):
    value, pull_back = version(problem.model, problem.model, theta, batch.x)
    along, of_x = pull_back(torch.cos(value))
    return value, of_x, along if isinstance(along, torch.Tensor) else problem.model.flatten(list(along.values()))


def sizes_of(rng):
    return [rng.choice([0, 1, rng.randint(2, 40), rng.randint(900, 1100)]) for _ in range(rng.randint(1, 4))] + [3]


def splitting(rng):
    sizes, clients = sizes_of(rng), rng.randint(1, 3)
    whole = random(clients, sum(sizes))
    value = torch.func.grad_and_value

    def run(version):
        return torch.vmap(value(lambda at: sum(part.sin().sum() for part in version(at, sizes))))(whole)

    return run


def norms(rng):
    parts = {str(i): random(size, seed=i) for i, size in enumerate(sizes_of(rng))}
    return lambda version: version(parts, random(5))


def steps_of_adam(rng):
    parts = {str(i): random(size, seed=i) for i, size in enumerate(sizes_of(rng))}
    size = sum(part.numel() for part in parts.values())
    settings, step = Adam(0.1, rng.choice([0.0, 0.1])), torch.tensor(rng.randint(1, 9), device=DEVICE)
    moments = Moments(random(size, seed=7), random(size, seed=8).square() + 0.01)
    scale = rng.choice([None, torch.tensor(0.3, device=DEVICE)])
    return lambda version: version(random(size, seed=9), parts, moments, step, settings, scale)


def keys(rng):
    clients = rng.randint(1, 300)
    coordinates = [torch.arange(clients, device=DEVICE) * rng.randint(1, 99) for _ in range(rng.randint(1, 3))]
    return lambda version: torch.vmap(lambda *one: version(5, "test", *one))(*coordinates)


def some_keys(rng):
    return torch.arange(rng.randint(1, 9), device=DEVICE) * 0x9E3779B97F4A7 - rng.randint(0, 1 << 40)


def spreads(rng):
    state, count = some_keys(rng), rng.randint(1, 300)
    return lambda version: version(state, count)


def choices(rng):
    state, count = some_keys(rng), rng.randint(1, 30)
    total = count + torch.arange(len(state), device=DEVICE) * rng.randint(0, 50)
    return lambda version: version(state, total, count)


def gathering(rng):
    federation = ragged(shape=(rng.randint(1, 4), rng.randint(1, 20), rng.randint(1, 20)), pixels=True).to(DEVICE)
    rows = torch.arange(rng.randint(1, 20), device=DEVICE) * 7 % len(federation.x)
    return lambda version: version(federation, rows, torch.float32)


def summing(rng):
    samples = rng.randint(1, 40)
    weight = (random(samples) > -1).float()
    return lambda version: (version(weight, random(samples, seed=1)), version(weight, random(samples, 3, seed=2)))


def finding_nan(rng):
    rows = random(rng.randint(1, 5), rng.randint(1, 40))
    for row in range(len(rows)):
        rows[row, rng.randrange(rows.shape[1])] = rng.choice([0.0, torch.nan, torch.inf, -torch.inf])
    return lambda version: version(rows)


def fusing(rng):
    channels, filters, classes = rng.randint(1, 4), rng.randint(1, 6), rng.randint(2, 5)
    pool = rng.choice([nn.Identity(), nn.MaxPool2d(2)])
    torch.manual_seed(rng.randint(0, 99))
    layers = nn.Conv2d(channels, filters, rng.randint(1, 3), padding=1), nn.ReLU(), pool, nn.Flatten()
    x = random(rng.randint(1, 4), channels, rng.randint(4, 9), rng.randint(4, 9)).to("cpu")
    module = nn.Sequential(*layers, nn.Linear(nn.Sequential(*layers)(x).shape[1], classes))
    return lambda version: version(module)(x)


def lstm_layers(rng):
    clients, length, samples, inputs, hidden = (rng.randint(1, most) for most in (3, 3, 5, 6, 20))
    shapes = (length, samples, inputs), (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)
    given = [0.5 * random(clients, *shape, seed=i) for i, shape in enumerate(shapes)]

    def run(version):
        loss = torch.func.grad_and_value(lambda *each: version(*each).sin().sum(), argnums=tuple(range(5)))
        return torch.vmap(loss)(*given)

    return run


def pulling(rng):
    weight = random(rng.randint(1, 9), rng.randint(1, 9))
    at, cotangent = random(weight.shape[1], seed=1), random(len(weight), seed=2)
    return lambda version: version(lambda x: torch.sin(weight @ x), at, cotangent)


CASES = {
    "alone.gradient": on_problem(lambda version, p, theta, batch: version(p.loss, theta, batch), False, False),
    "optim.gradient_of_problem": on_problem(lambda version, p, theta, b: version(p.loss, theta, b), True, False),
    "alone.pull_back": pulling,
    "vectors.network_vjp_alone": on_problem(vjp, False, False),
    "alone.cross_entropy": on_problem(lambda version, p, theta, b: version(p.model(theta, b.x), b.y), False, False),
    "blocks.cross_entropy": on_problem(
        lambda version, p, theta, b: version(Classification(p.classes), p.model(theta, b.x), b), True, False
    ),
    "vectors.network_vjp": on_problem(vjp, True, False),
    "vectors.rows_are_finite_on_gpu": finding_nan,
    "vectors.rows_are_finite_on_cpu": finding_nan,
    "vectors.split": splitting,
    "optim.sgd_alone": on_problem(steps_along, False, True),
    "optim.sgd_on_gpu": on_problem(steps_along, True, True),
    "optim.sgd_step_by_kernel": on_problem(one_step, True, True),
    "optim.sgd_on_loss_alone": on_problem(steps_on_loss, False, True),
    "optim.sgd_on_loss_on_gpu": on_problem(steps_on_loss, True, True),
    "optim.norm": norms,
    "optim.adam": steps_of_adam,
    "keys.key": keys,
    "keys.spread": spreads,
    "keys.choose": choices,
    "samples.gather": gathering,
    "samples.weighted_sum": summing,
    "fused.fused": fusing,
    "lstm.layer": lstm_layers,
}


def name_of(version):
    return f"{version.__module__.removeprefix('pefll.backend.')}.{version.__name__}"


def test_there_is_a_case_for_every_version():
    assert sorted(CASES) == sorted(name_of(version) for _, version in ALL)


@pytest.mark.parametrize(("plain", "version"), ALL, ids=lambda one: getattr(one, "__qualname__", None))
@EXAMPLES
@given(seed=st.integers(0, 1 << 20))
def test_a_faster_version_computes_what_its_reference_does(plain, version, seed):
    run = CASES[name_of(version)](Random(seed))
    got = run(version)
    with only_references():
        wanted = run(plain.__wrapped__)
    is_float = not isinstance(got, torch.Tensor) or got.is_floating_point()
    torch.testing.assert_close(got, wanted, rtol=1e-4 * is_float, atol=1e-5 * is_float)


# FedAvg takes steps on the loss; Per-FedAvg asks for gradients.
@pytest.mark.parametrize("name", ["fedavg", "per-fedavg"])
def test_the_vector_engine_trains_a_users_own_loss(name, monkeypatch):
    monkeypatch.setattr(client_axis, "_cross_entropy", lambda *_: pytest.fail("the kernel of another loss"))
    federation = ragged(sizes=(1, 4), clients=4, seen=3)
    problem = dataclasses.replace(problem_of(federation), task=Squares(federation.classes))
    method = build_method(name, problem, {"batch_size": 3, **({"local_steps": 2} if name == "fedavg" else {})})
    states = []
    for make, dtype, place in ((SerialEngine, torch.float64, {}), (VectorEngine, torch.float32, {"device": DEVICE})):
        engine = make(federation, method, seed=1, clients_per_round=2, dtype=dtype, **place)
        states.append(flat(engine.advance(engine.start(), 0, 1)))
        engine.close()
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-5)
