"""Kernels for whole parameter vectors: their parts, steps of SGD in place and not, Adam."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pefll.backend import recorded, vectors
from pefll.backend.optim import gradient_in_parts, sgd_step
from pefll.backend.recorded import overwriting
from pefll.core.errors import PefllError
from pefll.data.client import Batch
from pefll.engines.device_queue import queue_of
from pefll.engines.vector import VectorEngine
from pefll.methods import Problem, build_method
from pefll.methods.optim import SGD, Adam, Moments, adam, as_vector, norm, sgd_on_loss
from pefll.models import Network
from pefll.models.convnet import ConvNet
from tests.backend.test_kernels import DEVICE, EXAMPLES, Made, both, close, interpreter, products, random  # noqa: F401 (fixtures)
from tests.federations import flat, problem_of, ragged

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # see test_kernels.py

# With one block and several, one that ends with its part, empty ones, and parts that begin at odd places.
SHAPES = [(3,), (2, 1, 520), (0,), (1024,), (33,), (0, 4)]
SIZE = 3 + 1040 + 1024 + 33


def in_parts(whole, shapes=SHAPES):
    """Return parts of a vector [D]."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return tuple(part.view(shape) for part, shape in zip(torch.split(whole, sizes), shapes, strict=True))


@pytest.fixture
def in_place(monkeypatch):
    """Notes the steps of SGD that are taken in place."""
    steps, real = [], vectors._sgd_in_place
    monkeypatch.setattr(vectors, "_sgd_in_place", lambda *given: steps.append(given) or real(*given))
    return steps


def test_a_vector_in_parts():
    sizes = [5, 0, 1200, 16, 2100]

    def loss(vector):
        first, none, second, unused, third = vectors.split(vector, sizes)
        assert [len(part) for part in (first, none, second, unused, third)] == sizes
        return first.square().sum() + (second * torch.arange(1200.0, device=DEVICE)).sum() + third.sin().sum()

    def plainly(vector):
        first, _, second, _, third = torch.split(vector, sizes)
        return first.square().sum() + (second * torch.arange(1200.0, device=DEVICE)).sum() + third.sin().sum()

    rows = random(3, sum(sizes))
    assert vectors.splits(rows[0], len(sizes))
    assert not vectors.splits(rows[0], vectors.MOST_PARTS + 1)
    wanted = torch.vmap(torch.func.grad(plainly))(rows)
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(rows), wanted)
    torch.testing.assert_close(torch.func.grad(loss)(rows[1]), wanted[1])
    both_axes = torch.vmap(torch.vmap(torch.func.grad(loss)))(rows.reshape(3, 1, -1))
    torch.testing.assert_close(both_axes[:, 0], wanted)
    # Joining is linear, so that it has a derivative of its own.
    twice = torch.func.grad(lambda vector: torch.func.grad(loss)(vector)[:5].sum())(rows[0])
    torch.testing.assert_close(twice[:5], torch.full((5,), 2.0, device=DEVICE))
    assert not twice[5:].any()


@pytest.mark.parametrize("clip", [None, 2.0, 1e9])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_sgd(clip, masked, moving, split, monkeypatch):
    from pefll.backend.kernels import vectors as kernels

    monkeypatch.setattr(kernels, "_MOST_SHARES", 3)  # fewer than blocks, and these not a multiple of it
    theta, velocity, gradient = random(3, SIZE), random(3, SIZE, seed=1), random(3, SIZE, seed=2)
    active = torch.tensor([True, False, True], device=DEVICE) if masked else None

    def run(theta, velocity, gradient):
        def one(theta, velocity, gradient, active):
            along = in_parts(gradient) if split else gradient
            return sgd_step(theta, velocity if moving else None, along, SGD(0.1, 0.9, 0.01, clip), active=active)

        return torch.vmap(one, in_dims=(0, 0, 0, 0 if masked else None))(theta, velocity, gradient, active)

    narrow, wide = both(run, theta, velocity, gradient)
    for got, wanted in zip(narrow, wide, strict=True):
        close(got, wanted)
    if masked:
        assert torch.equal(narrow[0][1], theta[1])


@pytest.mark.parametrize("shared", [False, True])
def test_sgd_with_a_proximal_term_and_a_rate_on_the_device(shared, in_place):
    theta, velocity, gradient, towards = (random(3, SIZE, seed=seed) for seed in range(4))
    towards, rate = towards[0] if shared else towards, torch.tensor([0.1, 0.2, 0.3], device=DEVICE)
    rate = rate[0] if shared else rate
    dims = (0, 0, 0, None if shared else 0, None if shared else 0, None)

    def one(theta, velocity, gradient, towards, rate, overwrites):
        sgd = SGD(rate, 0.9, 0.01, 2.0, proximal=0.7)
        return sgd_step(theta, velocity, in_parts(gradient), sgd, None, towards, in_place=overwrites)

    def run(*given, overwrites=False):
        return torch.vmap(one, in_dims=dims)(*given, overwrites)

    narrow, wide = both(run, theta, velocity, gradient, towards, rate)
    for got, wanted in zip(narrow, wide, strict=True):
        close(got, wanted)
    after = run(theta.clone(), velocity.clone(), gradient, towards, rate, overwrites=True)
    assert len(in_place) == 1
    assert all(torch.equal(*pair) for pair in zip(after, narrow, strict=True))


# Sizes of parts around those of a kernel's blocks, and as they come.
PARTS = st.lists(
    st.one_of(st.integers(0, 40), st.sampled_from([511, 512, 513, 1024, 1500, 2049])), min_size=1, max_size=6
)


@EXAMPLES
@given(
    PARTS, st.integers(1, 4), st.booleans(), st.sampled_from([None, 0.5, 1e9]), st.floats(0, 0.99), st.integers(0, 15)
)
def test_sgd_of_any_parts(sizes, clients, moving, clip, momentum, mask):
    theta, velocity, along = (random(clients, sum(sizes), seed=seed) for seed in range(3))
    active = torch.tensor([bool(mask >> client & 1) for client in range(clients)], device=DEVICE)

    def run(theta, velocity, along):
        def one(theta, velocity, along, active):
            parts = tuple(torch.split(along, sizes))
            return sgd_step(theta, velocity if moving else None, parts, SGD(0.1, momentum, 0.01, clip), active)

        return torch.vmap(one)(theta, velocity, along, active)

    narrow, wide = both(run, theta, velocity, along)
    for got, wanted in zip(narrow, wide, strict=True):
        close(got, wanted)
    assert torch.equal(narrow[0][~active], theta[~active])


@EXAMPLES
@given(PARTS, st.booleans(), st.floats(0, 0.5), st.integers(1, 1000))
def test_adam_and_the_norm_of_any_parts(sizes, scaled, decay, steps):
    parameters, along, first, second = (random(sum(sizes), seed=seed) for seed in range(4))
    step, scale = (torch.full((), number, device=DEVICE) for number in (steps, 0.6))

    def run(parameters, along, first, second, scale):
        named = {str(place): part for place, part in enumerate(torch.split(along, sizes))}
        rule, given_scale = Adam(1e-2, decay), scale if scaled else None
        after, moments = adam(parameters, named, Moments(first, second), step, rule, given_scale)
        return after, *moments, norm(named, parameters)

    narrow, wide = both(run, parameters, along, first, second.square(), scale)
    for got, wanted in zip(narrow, wide, strict=True):
        close(got, wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_sgd_in_place(masked, in_place):
    given = [random(2, 3, SIZE, seed=seed) for seed in range(3)]
    active = torch.tensor([[True, False, True], [False, True, True]], device=DEVICE) if masked else None

    def one(theta, velocity, gradient, active, in_place):
        return sgd_step(theta, velocity, in_parts(gradient), SGD(0.1, 0.9, 0.01, 2.0), active, in_place=in_place)

    def run(theta, velocity, gradient, overwrites):
        dims = (0, 0, 0, 0 if masked else None, None)
        return torch.vmap(torch.vmap(one, in_dims=dims), in_dims=dims)(theta, velocity, gradient, active, overwrites)

    wanted = run(*given, overwrites=False)
    assert not in_place
    own = [part.clone() for part in given]
    after = run(*own, overwrites=True)
    assert len(in_place) == 1
    for expected, *found in zip(wanted, after, own, strict=False):
        assert all(torch.equal(one, expected) for one in found)
    assert torch.equal(own[2], given[2])
    assert all(torch.equal(part, random(2, 3, SIZE, seed=seed)) for seed, part in enumerate(given))


def test_sgd_in_place_of_vectors_in_another_layout():
    given = [random(2, 3, SIZE, seed=seed) for seed in range(3)]

    def one(theta, velocity, gradient):
        return sgd_step(theta, velocity, (gradient,), SGD(0.1, 0.9, 0.01, 2.0), in_place=True)

    def turned(part):
        return part.movedim(-1, 0).contiguous().movedim(0, -1)  # clients innermost in memory

    wanted = torch.vmap(one)(*(part[0].clone() for part in given))
    own = [turned(part[0]) for part in given]
    torch.vmap(one)(*own)
    assert all(torch.equal(*pair) for pair in zip(own[:2], wanted, strict=True))
    # Two axes that cannot be seen as one: better an error than a step that is lost.
    with pytest.raises(RuntimeError, match="view"):
        torch.vmap(torch.vmap(one))(*(part.transpose(0, 2).contiguous().transpose(0, 2) for part in given))


@pytest.mark.parametrize("shared", ["theta", "velocity", "both"])
def test_shared_vectors_are_not_overwritten(shared, in_place):
    theta, velocity, gradient = random(3, SIZE), random(3, SIZE, seed=1), random(3, SIZE, seed=2)
    theta = theta[0] if shared in ("theta", "both") else theta
    velocity = velocity[0] if shared in ("velocity", "both") else velocity
    given = theta.clone(), velocity.clone()

    def one(theta, velocity, gradient):
        return sgd_step(theta, velocity, (gradient,), SGD(0.1), in_place=True)

    dims = tuple(0 if part.dim() == 2 else None for part in (theta, velocity, gradient))
    after = torch.vmap(one, in_dims=dims)(theta, velocity, gradient)
    assert not in_place
    assert torch.equal(theta, given[0])
    assert torch.equal(velocity, given[1])
    wanted = torch.vmap(one)(theta.expand(3, -1).clone(), velocity.expand(3, -1).clone(), gradient)
    assert len(in_place) == 1
    assert all(torch.equal(*pair) for pair in zip(after, wanted, strict=True))


def test_nothing_is_overwritten_under_differentiation(in_place):
    theta, velocity = random(7), random(7, seed=1)
    given = theta.clone(), velocity.clone()
    torch.func.vjp(lambda at: sgd_step(at, velocity, (at,), SGD(0.1), in_place=True), theta)
    leaf = theta.clone().requires_grad_()
    sgd_step(leaf, velocity, (leaf,), SGD(0.1), in_place=True)
    assert not in_place
    assert torch.equal(theta, given[0])
    assert torch.equal(leaf, given[0])
    assert torch.equal(velocity, given[1])


@pytest.mark.parametrize("products", [pytest.param("float32", marks=pytest.mark.slow), "bf16"], indirect=True)
def test_a_local_step_launches_nothing_but_our_kernels(products, in_place):  # noqa: F811
    problem, sgd = Problem(Network(ConvNet((1, 14, 14), 3, 3, (6,))), (1, 14, 14), 3, 4), SGD(0.1, 0.9, 0.01, 2.0)
    theta, x = 0.3 * random(2, problem.model.size), random(2, 2, 2, 1, 14, 14, seed=1)
    y, weight = torch.tensor([[[0, 2], [1, 1]], [[1, 0], [2, 2]]], device=DEVICE), torch.ones(2, 2, 2, device=DEVICE)
    given = theta.clone()

    def train(loss):
        def one(theta, x, y, weight):
            return sgd_on_loss(loss, theta, [Batch(x[i], y[i], weight[i]) for i in range(2)], sgd)

        return torch.vmap(one)(theta, x, y, weight)

    with Made() as made:
        after = train(problem.loss)
    assert made.names == []
    assert len(in_place) == 1  # not the first step
    assert torch.equal(theta, given)
    wanted = train(lambda at, batch: problem.loss(at, batch))
    torch.testing.assert_close(after, wanted, rtol=0, atol=1e-6)


def test_gradients_in_parts_are_the_gradient(monkeypatch):
    federation = ragged()
    problem = problem_of(federation)
    theta, x = 0.3 * random(2, problem.model.size), random(2, 4, *federation.input_shape, seed=1)
    y, weight = torch.arange(8, device=DEVICE).reshape(2, 4) % 3, torch.ones(2, 4, device=DEVICE)
    in_parts = []

    def one(theta, *batch):
        found = gradient_in_parts(problem, theta, Batch(*batch))
        in_parts.append(isinstance(found, tuple))
        if isinstance(found, tuple):
            assert [part.shape for part in found] == problem.model.shapes
            found = problem.model.flatten(found)
        return found, problem.gradient(theta, Batch(*batch)), torch.func.grad(problem.loss)(theta, Batch(*batch))

    for most in (len(problem.model.names), len(problem.model.names) - 1):
        monkeypatch.setattr(vectors, "MOST_PARTS", most)
        found, wanted, by_loss = torch.vmap(one)(theta, x, y, weight)
        assert torch.equal(found, wanted)
        assert torch.equal(found, by_loss)
    assert in_parts == [True, False]


def test_a_recorded_step_is_in_place(monkeypatch, in_place):
    """Without a GPU: what is recorded is done at once, and replaying it does nothing."""

    class Graph:
        def replay(self):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(recorded, "capture", lambda *_: nullcontext())
    theta, along, steps = random(3, SIZE), random(3, SIZE, seed=1), torch.tensor([3, 0, 2], device=DEVICE)
    given = theta.clone()

    def run(repeat):
        def one(theta, along, steps):
            def step(i, at, speed):
                return sgd_step(at, speed, in_parts(along * at), SGD(0.1), i < steps, in_place=speed is not None)

            return repeat(step, (theta, None), 3)

        return torch.vmap(one)(theta, along, steps)

    def plainly(step, state, times):
        for i in range(times):
            state = step(i, *state)
        return state

    found = run(recorded.repeat)
    assert len(in_place) == 2
    assert all(torch.equal(*pair) for pair in zip(found, run(plainly), strict=True))
    assert torch.equal(theta, given)
    assert torch.equal(found[0][1], given[1])


# PeFLL's clients begin with vectors of their own, FedAvg's with the same one.
@pytest.mark.parametrize("name", ["pefll", pytest.param("fedavg", marks=pytest.mark.slow)])
def test_a_round_takes_its_steps_in_place(name, in_place):
    federation = ragged(shape=(1, 8, 8), pixels=True, sizes=(1, 4), clients=4, seen=3)
    rest = {"descriptor_batch": 3, "server_optimizer": "sgd"} if name == "pefll" else {}
    method = build_method(name, problem_of(federation, "cnn"), {"local_steps": 3, "batch_size": 3} | rest)
    engine = VectorEngine(federation, method, seed=1, clients_per_round=2, device=DEVICE)
    with queue_of(engine).turn():
        start = engine.start()
        before = flat(start).clone()
        engine.checked_round(
            start, torch.zeros((), dtype=torch.int64, device=DEVICE)
        )  # once; `advance` would also record it
    engine.close()
    assert len(in_place) == 2
    assert len(in_place[0][2]) == len(method.problem.model.names)
    assert torch.equal(flat(start), before)


@pytest.mark.parametrize(("scaled", "decay"), [(False, 0.0), (True, 0.3)])
def test_adam(scaled, decay):
    parameters, gradient, first = (random(3000, seed=seed) for seed in range(3))
    second = random(3000, seed=3).square()
    step = torch.full((), 7, device=DEVICE)

    scale, rate = torch.full((), 0.6, device=DEVICE), torch.full((), 1e-2, device=DEVICE)

    def run(parameters, gradient, first, second, scale, rate):
        moments, lr = Moments(first, second), rate if scaled else 1e-2  # a schedule's rate is on the device
        after, moments = adam(parameters, gradient, moments, step, Adam(lr, decay), scale if scaled else None)
        return after, *moments

    narrow, wide = both(run, parameters, gradient, first, second, scale, rate)
    for got, wanted in zip(narrow, wide, strict=True):
        close(got, wanted)


def test_adam_and_the_norm_along_a_gradient_in_parts():
    parameters, gradient, first = (random(SIZE, seed=seed) for seed in range(3))
    moments, step = Moments(first, random(SIZE, seed=3).square()), torch.full((), 7, device=DEVICE)
    named = {str(place): part for place, part in enumerate(in_parts(gradient))}
    wanted = adam(parameters, gradient, moments, step, Adam(1e-2, 0.3))
    found = adam(parameters, named, moments, step, Adam(1e-2, 0.3))
    assert torch.equal(found[0], wanted[0])
    assert all(torch.equal(*pair) for pair in zip(found[1], wanted[1], strict=True))
    assert torch.equal(as_vector(named), gradient)
    other = random(10, seed=4)
    exact = torch.linalg.vector_norm(torch.cat([gradient, other]).double())
    close(norm(named, other), exact)
    close(norm(gradient, other), exact)
    # And where no kernel takes them.
    wide = {name: part.double() for name, part in named.items()}
    close(norm(wide, other.double()), exact)
    close(
        adam(parameters.double(), wide, Moments(*(part.double() for part in moments)), step, Adam(1e-2, 0.3))[0],
        wanted[0].double(),
    )


def test_adam_refuses_a_gradient_of_another_size():
    parameters, step = random(5000), torch.full((), 1, device=DEVICE)
    with pytest.raises(PefllError, match=r"5000 parameters.*PEFLL-S003"):
        adam(parameters, {"weight": random(100)}, Moments(parameters, parameters), step, Adam(1e-2))


def test_adam_joins_too_many_parts():
    parameters, gradient = random(vectors.MOST_PARTS + 1), random(vectors.MOST_PARTS + 1, seed=1)
    named = {str(place): part for place, part in enumerate(gradient.split(1))}
    moments, step = Moments(parameters.square(), parameters.square()), torch.full((), 3, device=DEVICE)
    found, wanted = (adam(parameters, along, moments, step, Adam(1e-2))[0] for along in (named, gradient))
    assert torch.equal(found, wanted)


def test_adam_in_place_where_the_engine_allows_it():
    given = [random(3000, seed=seed).square() for seed in range(3)]
    gradient, step = random(6000)[::2], torch.full((), 7, device=DEVICE)

    def run(parts):
        changed, moments = adam(parts[0], gradient, Moments(*parts[1:]), step, Adam(1e-2, 0.3))
        return [changed, *moments]

    wanted = run(given)
    with overwriting():
        own = [part.clone() for part in given]
        written = run(own)
        apart = [torch.stack([part, part], dim=1)[:, 0] for part in given]
        elsewhere = run(apart)
    assert all(mine is there for mine, there in zip(written, own, strict=True))
    for results in (wanted, elsewhere):
        assert not any(mine is there for mine in results for there in (*given, *apart))
    for results in (written, elsewhere):
        assert all(torch.equal(*pair) for pair in zip(results, wanted, strict=True))
    assert all(torch.equal(part, random(3000, seed=seed).square()) for seed, part in enumerate(given))
