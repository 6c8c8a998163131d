"""A learning problem with quadratic losses and two linear networks, whose gradient and constants are known exactly.

Client i has the loss f_i(θ) = ½ Σ_d a_id (θ_d - t_id)², and m samples x_ij. The embedding network is φ(x) = V x, the
hypernetwork is h(v) = H v. So a client's model is θ_i = H V x̄, where x̄ is the mean of all its samples, or of a batch.
The objective is F(H, V) = (1/n) Σ_i f_i(H V x̄_i) + λ (‖H‖² + ‖V‖²). It is not convex in (H, V).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pefll.core.randomness import generator
from pefll.guarantees.convergence import Constants

Array = npt.NDArray[np.float64]

CLIENTS, SAMPLES, INPUTS, DESCRIPTOR, WEIGHTS = 64, 64, 2, 2, 2
# The largest norm of a sample. Constants grow with it, and with them the number of rounds that the theorem needs.
LARGEST_SAMPLE = 0.5
# Training stays in the set of all (H, V) with these largest singular values; `reach` says how far it came.
BALL = 1.3


class Eta(NamedTuple):
    """The parameters of both networks, for any number of runs.

    Attributes:
        hypernetwork: H, [..., D, l].
        embedder: V, [..., l, p].
    """

    hypernetwork: Array
    embedder: Array


class Problem(NamedTuple):
    """One problem.

    Attributes:
        x: [n, m, p], samples.
        curvature: a, [n, D], at least 0.
        optimum: t, [n, D].
        noise: σ_1, standard deviation of a local gradient.
        penalty: λ.
    """

    x: Array
    curvature: Array
    optimum: Array
    noise: float
    penalty: float

    @property
    def mean(self) -> Array:
        """x̄_i, [n, p]."""
        means: Array = self.x.mean(axis=1)
        return means

    @property
    def covariance(self) -> Array:
        """Σ_i, the covariance of a client's samples, [n, p, p]. The mean of a batch of b has the covariance Σ_i/b."""
        apart = self.x - self.mean[:, None]
        found: Array = np.einsum("nmp,nmq->npq", apart, apart) / self.x.shape[1]
        return found


class Quadratic(NamedTuple):
    """F as a function of M = H V: row d of its gradient is S_d M_d - r_d.

    Attributes:
        second: S, [D, p, p].
        first: r, [D, p].
        constant: what F has besides.
        penalty: λ.
    """

    second: Array
    first: Array
    constant: float
    penalty: float

    def value(self, eta: Eta) -> Array:
        """Return F [...]."""
        product = eta.hypernetwork @ eta.embedder
        image = (self.second @ product[..., None])[..., 0]
        found: Array = (product * (0.5 * image - self.first)).sum(axis=(-1, -2)) + self.constant
        return found + self.penalty * squared_norm(eta)

    def gradient(self, eta: Eta) -> Eta:
        """Return ∇F, shaped as η."""
        hypernetwork, embedder = eta
        product = hypernetwork @ embedder
        slope = (self.second @ product[..., None])[..., 0] - self.first
        return Eta(
            slope @ np.swapaxes(embedder, -1, -2) + 2 * self.penalty * hypernetwork,
            np.swapaxes(hypernetwork, -1, -2) @ slope + 2 * self.penalty * embedder,
        )


def make_problem(seed: int, noise: float = 2.0, penalty: float = 1e-3) -> Problem:
    """Return a random problem. Clients have different samples, curvatures and optima, which no H V fits exactly."""
    random = generator(seed, "convergence/problem")
    own = random.standard_normal((CLIENTS, 1, INPUTS))
    own /= np.linalg.norm(own, axis=-1, keepdims=True)
    x = own + 0.4 * random.uniform(-1, 1, (CLIENTS, SAMPLES, INPUTS))
    x *= LARGEST_SAMPLE / np.linalg.norm(x, axis=-1).max()
    curvature = random.uniform(0.5, 1, (CLIENTS, WEIGHTS))
    common = random.standard_normal((WEIGHTS, INPUTS))
    common *= 0.7 / np.linalg.norm(common, ord=2)
    optimum = x.mean(axis=1) @ common.T + 0.05 * random.uniform(-1, 1, (CLIENTS, WEIGHTS))
    return Problem(x, curvature, optimum, noise, penalty)


def start(seed: int) -> Eta:
    """Return random initial parameters, with largest singular values of 0.6."""
    random = generator(seed, "convergence/start")
    parts = (random.standard_normal((WEIGHTS, DESCRIPTOR)), random.standard_normal((DESCRIPTOR, INPUTS)))
    hypernetwork, embedder = (0.6 * part / np.linalg.norm(part, ord=2) for part in parts)
    return Eta(hypernetwork, embedder)


def objective(problem: Problem, batch: float = np.inf) -> Quadratic:
    """Return F; with a number of samples `batch`, the expectation of F over descriptors from batches of that size.

    Small steps with descriptors from batches decrease this expectation, and not F itself.
    """
    curvature, mean, optimum = problem.curvature, problem.mean, problem.optimum
    moments = np.einsum("np,nq->npq", mean, mean) + problem.covariance / batch
    return Quadratic(
        second=np.einsum("nd,npq->dpq", curvature, moments) / len(mean),
        first=np.einsum("nd,nd,np->dp", curvature, optimum, mean) / len(mean),
        constant=float(0.5 * (curvature * optimum**2).sum(axis=1).mean()),
        penalty=problem.penalty,
    )


def lowest(problem: Problem) -> float:
    """Return F_*, a lower bound of F: its least value without penalty, if H V could be any matrix."""
    found = objective(problem)
    best = np.stack([np.linalg.lstsq(s, r, rcond=None)[0] for s, r in zip(found.second, found.first, strict=True)])
    return found.constant - 0.5 * float((best * found.first).sum())


def squared_norm(eta: Eta) -> Array:
    """Return ‖η‖² [...]."""
    found: Array = (eta.hypernetwork**2).sum(axis=(-1, -2)) + (eta.embedder**2).sum(axis=(-1, -2))
    return found


def reach(eta: Eta) -> Array:
    """Return the larger of the largest singular values of H and V, [...]. Training must stay below `BALL`."""
    found: Array = np.maximum(*(np.linalg.norm(part, ord=2, axis=(-2, -1)) for part in eta))
    return found


def constants(problem: Problem, initial: Eta) -> Constants:
    """Return constants that hold for all (H, V) in the ball, for all batches and, in local steps, all noise.

    ∇h at a batch with mean x has the squared norm ‖V x‖² + ‖x‖² ‖H‖², at most 2 ρ² ‖x‖² in the ball of radius ρ. Local
    steps bring θ closer to t, up to their noise. The noise of one step is at most σ_1, and the theorem's steps have
    β k L_1 ≤ L_1 / (8L) ≤ 1 / (8 b_2²), so the gradient grows by σ_1 / (8 b_2²) at most.
    """
    mean, curvature = problem.mean, problem.curvature
    of_means, of_samples = np.linalg.norm(mean, axis=1), np.linalg.norm(problem.x, axis=-1).max(axis=1)
    pull = np.linalg.norm(curvature * problem.optimum, axis=1)
    steepest = curvature.max(axis=1)
    b2 = 2**0.5 * BALL * of_samples.max()
    spread = np.trace(problem.covariance, axis1=1, axis2=2).max()
    gradient = pull + steepest * BALL**2 * of_means  # ‖∇f_i(h(S_i, η))‖, [n]
    return Constants(
        gap=float(objective(problem).value(initial)) - lowest(problem),
        b1=float((pull + steepest * BALL**2 * of_samples).max() + problem.noise / (8 * b2**2)),
        b2=float(b2),
        smooth1=float(steepest.max()),
        smooth2=float(of_means.max()),
        smooth3=2 * problem.penalty,
        sigma1=problem.noise,
        sigma2=float((2 * BALL**2 * spread) ** 0.5),
        sigma3=float(BALL**2 * spread**0.5),
        gamma=float((2 * BALL**2 * of_means**2 * gradient**2).mean() ** 0.5),
        clients=len(mean),
    )


def described(found: Constants) -> dict[str, Any]:
    """Return the constants as JSON, with L."""
    return found._asdict() | {"smoothness": found.smoothness}
