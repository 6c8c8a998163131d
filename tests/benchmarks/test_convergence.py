"""The quadratic problem of benchmarks.convergence: its gradient, its constants, and that its rounds are PeFLL's."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pefll
from benchmarks.convergence.problem import (
    BALL,
    DESCRIPTOR,
    INPUTS,
    WEIGHTS,
    Eta,
    constants,
    lowest,
    make_problem,
    objective,
    reach,
    squared_norm,
    start,
)
from benchmarks.convergence.simulation import Draws, Setting, draw, floor_of, round_step, simulate
from benchmarks.convergence.slopes import log_slope, slope_estimate
from pefll.engines.serial import SerialEngine
from pefll.guarantees.convergence import learning_rate, sharper_terms, squared_bias, terms
from pefll.methods.contract import Problem
from pefll.methods.pefll import PeFLL
from pefll.models import Network
from pefll.tasks import Regression

ROOT = Path(__file__).parents[2]
PROBLEM = make_problem(3)


class Means(nn.Module):
    """The embedding network: linear in the first INPUTS columns of a sample."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(INPUTS, DESCRIPTOR, bias=False)

    def forward(self, x, y):
        del y
        return self.linear(x[:, :INPUTS])


class Scaled(nn.Module):
    """The clients' model: its weights, times the other columns of a sample, the square roots of the curvature."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(WEIGHTS))

    def forward(self, x):
        return x[:, INPUTS:] * self.theta


def half_square(output, y):
    return 0.5 * (output - y).square().sum(dim=1)


def as_federation(noise):
    """Return the problem as clients with samples: noise in labels is noise in gradients."""
    total, samples, _ = PROBLEM.x.shape
    root = np.repeat(PROBLEM.curvature[:, None] ** 0.5, samples, axis=1)
    x = np.concatenate([PROBLEM.x, root], axis=-1)
    y = root * PROBLEM.optimum[:, None] + noise * np.random.default_rng(1).standard_normal(root.shape)
    rows = torch.arange(total * samples)
    count = torch.zeros(3, total, dtype=torch.int64)
    count[0] = samples
    offset = torch.zeros_like(count)
    offset[0] = samples * torch.arange(total)
    flat = torch.from_numpy(x.reshape(-1, x.shape[-1])), torch.from_numpy(y.reshape(-1, WEIGHTS))
    return pefll.Federation(*flat, rows, offset, count, num_seen=total, classes=0)


def test_one_round_is_that_of_pefll_in_float64():
    batch, steps, lr, penalty, clients = 8, 3, 0.05, 0.01, 4
    problem = PROBLEM._replace(penalty=penalty)
    data = as_federation(noise=0.5)
    task = Regression(own_loss=half_square, standardise=False, mean=(0.0,) * WEIGHTS, deviation=(1.0,) * WEIGHTS)
    learning = Problem(Network(Scaled()), data.input_shape, 0, data.num_clients, task=task)
    method = PeFLL(
        embedding=Means(),
        hypernetwork=nn.Linear(DESCRIPTOR, WEIGHTS, bias=False),
        descriptor_size=DESCRIPTOR,
        descriptor_batch=batch,
        local_steps=steps,
        batch_size=batch,
        client_lr=lr,
        client_momentum=0.0,
        client_clip=0.0,
        server_optimizer="sgd",
        lambda_h=steps * penalty,
        lambda_v=steps * penalty,
        lambda_theta=0.0,
    ).bind(learning)
    initial = start(3)
    with closing(SerialEngine(data, method, 5, clients, torch.float64)) as engine:
        server = engine.start()._replace(
            hypernetwork=torch.from_numpy(initial.hypernetwork.ravel().copy()),
            embedder=torch.from_numpy(initial.embedder.ravel().copy()),
            shift=torch.zeros((), dtype=torch.float64),
            scale=torch.ones((), dtype=torch.float64),
        )
        eta = Eta(*(part[None] for part in initial))
        for t in range(3):
            chosen = engine._sample(t)
            here = [engine._client(int(id_), t) for id_ in chosen]
            inputs = [next(iter(client.batches("descriptor", batch, 1))).x[:, :INPUTS].mean(0) for client in here]
            # The gradient of a batch is a (θ - t) + ξ, so ξ is the root times what its labels are above a·t.
            root = problem.curvature[chosen] ** 0.5
            wanted = root * problem.optimum[chosen]
            labels = [torch.stack([one.y.mean(0) for one in client.batches("adapt", batch, steps)]) for client in here]
            noise = root[:, None] * (wanted[:, None] - torch.stack(labels).numpy())
            draws = Draws(chosen[None], torch.stack(inputs).numpy()[None], noise[None])
            eta = round_step(problem, eta, draws, lr)
            server = engine.advance(server, t, 1)
            assert np.abs(server.hypernetwork.numpy() - eta.hypernetwork.ravel()).max() < 1e-14
            assert np.abs(server.embedder.numpy() - eta.embedder.ravel()).max() < 1e-14
        assert np.abs(eta.hypernetwork - initial.hypernetwork).max() > 1e-3  # it did move


def by_loop(problem, hypernetwork, embedder):
    """Return F from its definition, one client after another, in torch."""
    total = 0
    for x, a, optimum in zip(problem.x, problem.curvature, problem.optimum, strict=True):
        theta = hypernetwork @ embedder @ torch.from_numpy(x).mean(0)
        total = total + 0.5 * (torch.from_numpy(a) * (theta - torch.from_numpy(optimum)) ** 2).sum()
    return total / len(problem.x) + problem.penalty * (hypernetwork.square().sum() + embedder.square().sum())


def test_objective_and_gradient_against_autograd():
    initial = start(1)
    weights = [torch.from_numpy(part).requires_grad_() for part in initial]
    value = by_loop(PROBLEM, *weights)
    value.backward()
    exact = objective(PROBLEM)
    assert float(exact.value(initial)) == pytest.approx(float(value.detach()), rel=1e-12)
    for ours, weight in zip(exact.gradient(initial), weights, strict=True):
        assert np.allclose(ours, weight.grad.numpy(), rtol=1e-11, atol=1e-14)
    assert lowest(PROBLEM) <= float(value.detach())


def test_the_expected_objective_is_the_mean_over_batches():
    initial = start(1)
    random = np.random.default_rng(0)
    values = []
    for _ in range(4000):
        rows = random.integers(0, PROBLEM.x.shape[1], (len(PROBLEM.x), 2))
        theta = np.take_along_axis(PROBLEM.x, rows[..., None], 1).mean(1) @ (initial.hypernetwork @ initial.embedder).T
        values.append(0.5 * (PROBLEM.curvature * (theta - PROBLEM.optimum) ** 2).sum(1).mean())
    values = np.array(values) + PROBLEM.penalty * squared_norm(initial)
    expected = float(objective(PROBLEM, 2).value(initial))
    assert abs(values.mean() - expected) < 4 * values.std() / 4000**0.5
    assert expected - float(objective(PROBLEM).value(initial)) > 10 * values.std() / 4000**0.5


def test_the_constants_hold_in_the_ball():
    found = constants(PROBLEM, start(0))
    random = np.random.default_rng(0)
    x, mean, total = PROBLEM.x, PROBLEM.mean, len(PROBLEM.x)
    lr_k = 1 / (8 * found.smoothness)
    for _ in range(300):
        eta = Eta(*(random.standard_normal(shape) for shape in ((WEIGHTS, DESCRIPTOR), (DESCRIPTOR, INPUTS))))
        eta = Eta(*(BALL * part / np.linalg.norm(part, 2) for part in eta))
        eta = eta if random.random() < 0.5 else Eta(eta.hypernetwork, eta.embedder * random.random())
        client = random.integers(total)
        x_b = x[client, random.integers(x.shape[1], size=1 + random.integers(4))].mean(0)

        def jacobian(at, eta=eta):  # of h at a batch with mean `at`
            return np.hstack([np.kron(np.eye(WEIGHTS), eta.embedder @ at), np.kron(eta.hypernetwork, at)])

        assert np.linalg.norm(jacobian(x_b), 2) <= found.b2 + 1e-12
        theta = eta.hypernetwork @ eta.embedder @ x_b
        local = theta + lr_k * found.sigma1 * random.uniform(-1, 1, WEIGHTS) / WEIGHTS**0.5
        slope = PROBLEM.curvature[client] * (local - PROBLEM.optimum[client])
        assert np.linalg.norm(slope) <= found.b1
        own = [
            jacobian(m).T @ (a * (eta.hypernetwork @ eta.embedder @ m - t))
            for m, a, t in zip(mean, PROBLEM.curvature, PROBLEM.optimum, strict=True)
        ]
        apart = np.array(own) - np.mean(own, axis=0)
        assert (apart**2).sum(1).mean() <= found.gamma**2
        off = x[client] - mean[client]
        assert np.mean([np.linalg.norm(jacobian(one), 2) ** 2 for one in off]) <= found.sigma2**2 + 1e-12
        assert ((off @ (eta.hypernetwork @ eta.embedder).T) ** 2).sum(1).mean() <= found.sigma3**2 + 1e-12
        other = Eta(*(0.9 * part for part in eta))
        exact = objective(PROBLEM)
        change = squared_norm(Eta(*(a - b for a, b in zip(exact.gradient(eta), exact.gradient(other), strict=True))))
        step = squared_norm(Eta(*(a - b for a, b in zip(eta, other, strict=True))))
        assert change <= found.smoothness**2 * step


def test_noise_has_the_known_variance_and_batches_come_with_replacement():
    setting = Setting(200, 3, 2, 5)
    every = list(draw(PROBLEM, setting, 4, 0))
    assert len(every) == 200
    for one in every:
        assert np.allclose((one.noise**2).sum(-1), PROBLEM.noise**2)
        assert all(len(set(row)) == 3 for row in one.chosen)
    errors = np.stack([one.inputs - PROBLEM.mean[one.chosen] for one in every])
    of_clients = np.stack([np.trace(PROBLEM.covariance[one.chosen], axis1=-1, axis2=-2) for one in every])
    assert (errors**2).sum(-1).mean() == pytest.approx(of_clients.mean() / 5, rel=0.1)
    assert (
        abs(np.stack([one.noise for one in every]).mean())
        < 4 * PROBLEM.noise / np.size([e.noise for e in every]) ** 0.5
    )


def test_a_simulation_is_deterministic_and_below_the_bound():
    initial, setting = start(0), Setting(4000, 4, 2, 8)
    first, again = (simulate(PROBLEM, initial, setting, 4, 7) for _ in range(2))
    assert (first.gradient == again.gradient).all()
    assert first.reach <= BALL
    known = constants(PROBLEM, initial)
    for bound in (terms(known, *setting), sharper_terms(known, *setting)):
        assert first.gradient.max() < bound.total
    assert float(reach(Eta(*(part[None] for part in initial)))[0]) == pytest.approx(0.6)


def test_without_noise_all_clients_and_one_step_is_gradient_descent():
    quiet, initial = PROBLEM._replace(noise=0.0), start(0)
    setting = Setting(50, len(PROBLEM.x), 1)
    found = simulate(quiet, initial, setting, 1, 0)
    eta, values, exact = initial, [], objective(quiet)
    for _ in range(50):
        slope = exact.gradient(eta)
        values.append(float(squared_norm(slope)))
        eta = Eta(*(part - learning_rate(*setting[:3]) * step for part, step in zip(eta, slope, strict=True)))
    assert found.gradient[0] == pytest.approx(np.mean(values), rel=1e-12)


def test_the_floor_of_batches_is_of_second_order():
    batches = (4, 16, 64)
    assert log_slope(batches, [floor_of(PROBLEM, start(0), batch) for batch in batches]) == pytest.approx(-2, abs=0.05)


def test_the_mean_error_of_batches_is_below_its_bound():
    """E[∇f(h(B)) ∇h(B)] - ∇F_i, exactly: the difference of the gradients of the two objectives."""
    known, random = constants(PROBLEM, start(0)), np.random.default_rng(0)
    for _ in range(50):
        eta = Eta(*(random.standard_normal(shape) for shape in ((WEIGHTS, DESCRIPTOR), (DESCRIPTOR, INPUTS))))
        eta = Eta(*(BALL * part / np.linalg.norm(part, 2) for part in eta))
        for batch in (1, 4):
            exact, expected = objective(PROBLEM).gradient(eta), objective(PROBLEM, batch).gradient(eta)
            error = squared_norm(Eta(*(a - b for a, b in zip(exact, expected, strict=True))))
            assert 0 < error <= squared_bias(known, batch)


def test_a_slope_is_found_again_and_its_interval_holds_it():
    x = np.array([1.0, 10.0, 100.0, 1000.0])
    assert log_slope(x, 3 * x**-0.7) == pytest.approx(-0.7, abs=1e-12)
    random = np.random.default_rng(0)
    hits = 0
    for seed in range(60):
        noisy = [3 * each**-0.7 * random.gamma(4, 1 / 4, 30) for each in x]
        found = slope_estimate(x, noisy, seed)
        hits += found.low <= -0.7 <= found.high
        assert found.high - found.low < 0.2
    assert 50 <= hits <= 60


def test_the_command_writes_rows_page_and_figure(tmp_path):
    out = tmp_path / "convergence.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.convergence",
        "--fewer",
        "400",
        "--repetitions",
        "3",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert {row["sweep"] for row in record["rows"]} == {"rounds", "clients", "steps", "batch"}
    assert record["slopes"]["rounds"]["low"] <= record["slopes"]["rounds"]["high"]
    assert "Slopes on logarithmic axes" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").stat().st_size > 10_000
