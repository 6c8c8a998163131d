"""PeFLL's rounds on the quadratic problem, for many repetitions at once.

`round_step` is Algorithm 2 with plain averaged steps, in float64. tests/benchmarks/test_convergence.py shows that it
equals `PeFLL.round` with `server_optimizer="sgd"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.convergence.problem import Array, Eta, Problem, objective, reach, squared_norm
from pefll.core.progress import Monitor
from pefll.core.randomness import generator
from pefll.guarantees.convergence import learning_rate

CHUNK = 100  # rounds whose random numbers are drawn at once
REACH_EVERY = 10  # rounds between two looks at the largest singular values, which take time


class Setting(NamedTuple):
    """How long and how a problem is trained.

    Attributes:
        rounds: T.
        clients: c, clients per round.
        steps: k, local steps.
        batch: b, samples of a descriptor's batch, drawn with replacement; 0 for all samples.
    """

    rounds: int
    clients: int
    steps: int
    batch: int = 0


class Outcome(NamedTuple):
    """What repetitions of a training came to.

    Attributes:
        gradient: [repetitions], mean of ‖∇F(η_t)‖² over the rounds.
        reach: the largest singular value of H and V in all repetitions.
    """

    gradient: Array
    reach: float


class Draws(NamedTuple):
    """The random choices of one round, for R repetitions.

    Attributes:
        chosen: int64 [R, c], the round's clients.
        inputs: [R, c, p], mean of the samples in each client's descriptor batch.
        noise: [R, c, k, D], errors of the local gradients.
    """

    chosen: npt.NDArray[np.int64]
    inputs: Array
    noise: Array


def round_step(problem: Problem, eta: Eta, draws: Draws, lr: float) -> Eta:
    """Return η after one round, with R repetitions as first axis."""
    hypernetwork, embedder = eta
    clients, steps = draws.noise.shape[1:3]
    curvature, optimum = problem.curvature[draws.chosen], problem.optimum[draws.chosen]
    v = draws.inputs @ embedder.swapaxes(-1, -2)  # [R, c, l]
    theta = generated = v @ hypernetwork.swapaxes(-1, -2)  # [R, c, D]
    for step in range(steps):
        theta = theta - lr * (curvature * (theta - optimum) + draws.noise[:, :, step])
    delta = (generated - theta) / clients
    d_hypernetwork = delta.swapaxes(-1, -2) @ v
    d_embedder = (delta @ hypernetwork).swapaxes(-1, -2) @ draws.inputs
    # The theorem's server takes k steps on its penalty, as clients do on their losses. Algorithm 2 takes one, so PeFLL
    # gets k times the λ of the objective.
    kept = 1 - 2 * lr * steps * problem.penalty
    return Eta(kept * hypernetwork - d_hypernetwork, kept * embedder - d_embedder)


def draw(problem: Problem, setting: Setting, repetitions: int, seed: int) -> Iterator[Draws]:
    """Yield the random choices of each round. Clients, batches and noise each have their own random numbers.

    So two settings with the same seed differ only in what the setting changes.
    """
    who, which, errors = (generator(seed, f"convergence/{part}") for part in ("clients", "batches", "noise"))
    total, samples, inputs = problem.x.shape
    weights = problem.optimum.shape[1]
    size = problem.noise / weights**0.5  # so that the squared norm of ±size is σ_1² exactly
    shape = repetitions, setting.clients
    means = problem.mean
    for first in range(0, setting.rounds, CHUNK):
        count = min(CHUNK, setting.rounds - first)
        chosen = who.random((count, repetitions, total), dtype=np.float32).argsort(axis=-1)[..., : setting.clients]
        if setting.batch:
            rows = (
                which.integers(0, samples, (count, *shape, setting.batch), dtype=np.int32) + samples * chosen[..., None]
            )
            given = problem.x.reshape(-1, inputs)[rows].mean(axis=-2)
        else:
            given = means[chosen]
        signs = errors.integers(0, 2, (count, *shape, setting.steps, weights), dtype=np.int8)
        yield from map(Draws, chosen, given, size * (2.0 * signs - 1))


def simulate(
    problem: Problem, initial: Eta, setting: Setting, repetitions: int, seed: int, watch: Monitor | None = None
) -> Outcome:
    """Train `repetitions` times from the same start, and return the mean squared gradient of each.

    Args:
        problem: the problem.
        initial: η_0.
        setting: T, c, k and b; the learning rate is the theorem's.
        repetitions: R, number of trainings with different random choices.
        seed: seed of these choices.
        watch: shows progress.
    """
    lr = learning_rate(setting.rounds, setting.clients, setting.steps)
    exact = objective(problem)
    eta = Eta(*(np.repeat(part[None], repetitions, axis=0) for part in initial))
    total, largest = np.zeros(repetitions), 0.0
    for t, draws in enumerate(draw(problem, setting, repetitions, seed)):
        total += squared_norm(exact.gradient(eta))
        eta = round_step(problem, eta, draws, lr)
        if t % REACH_EVERY == 0:
            largest = max(largest, float(reach(eta).max()))
        if watch and t % CHUNK == 0:
            watch.at(t)
    return Outcome(total / setting.rounds, largest)


def floor_of(problem: Problem, initial: Eta, batch: int, steps: int = 200_000, lr: float = 1.0) -> float:
    """Return ‖∇F‖² where small steps with descriptors from batches end: at the least expectation of F over batches."""
    exact, expected = objective(problem), objective(problem, batch)
    eta = initial
    for _ in range(steps):
        slope = expected.gradient(eta)
        if squared_norm(slope) < 1e-24:
            break
        eta = Eta(*(part - lr * change for part, change in zip(eta, slope, strict=True)))
    return float(squared_norm(exact.gradient(eta)))
