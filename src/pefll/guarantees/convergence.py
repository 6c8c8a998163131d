"""Theorem 3.1: how fast PeFLL's training converges, term by term, for a problem whose constants are known.

T rounds with c clients each, k local steps, and descriptors from batches of b samples; the clients' learning rate is
β = 2√c / (k√T). The mean over the rounds of E‖∇F(η_t)‖² is at most the sum of five terms. docs/theory.md derives them.
The paper's proof has errors, so `terms` has corrected constants; the paper's own are there for comparison.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pefll.core.errors import PefllError


class Constants(NamedTuple):
    """The constants of a problem in the assumptions of Theorem 3.1. They hold wherever training comes.

    Attributes:
        gap: F(η_0) - F_*, where F_* is a lower bound of the objective F.
        b1: bound of a client's gradient, ‖∇f_i(θ)‖.
        b2: bound of the generator's derivative, ‖∇h(B, η)‖, for all batches B of a client.
        smooth1: L_1, Lipschitz constant of ∇f_i.
        smooth2: L_2, Lipschitz constant of ∇h(S_i, ·).
        smooth3: L_3, Lipschitz constant of the gradient of the server's objective f.
        sigma1: σ_1, standard deviation of a client's stochastic gradients.
        sigma2: σ_2, where σ_2²/b bounds E‖∇h(B, η) - ∇h(S_i, η)‖².
        sigma3: σ_3, where σ_3²/b bounds E‖h(B, η) - h(S_i, η)‖².
        gamma: γ_G, the square root of the bound of the mean of ‖∇F_i(η) - ∇F̄(η)‖² over clients.
        clients: n, number of clients that rounds are drawn from, without replacement; infinite if unknown.
    """

    gap: float
    b1: float
    b2: float
    smooth1: float
    smooth2: float
    smooth3: float
    sigma1: float
    sigma2: float
    sigma3: float
    gamma: float
    clients: float = math.inf

    @property
    def smoothness(self) -> float:
        """L = b_1 L_2 + b_2² L_1 + L_3, a Lipschitz constant of ∇F."""
        return self.b1 * self.smooth2 + self.b2**2 * self.smooth1 + self.smooth3


class Terms(NamedTuple):
    """The five terms of the bound, in the paper's order.

    Attributes:
        start: what is left of the distance F(η_0) - F_*.
        noise: noise of local gradients, and differences among clients.
        drift: clients move away from their generated models during local steps.
        jacobian: descriptors from batches disturb the derivative of the generator.
        model: descriptors from batches disturb the generated models.
    """

    start: float
    noise: float
    drift: float
    jacobian: float
    model: float

    @property
    def total(self) -> float:
        """The bound."""
        return sum(self)


class SharperTerms(NamedTuple):
    """The terms of the bound for quadratic losses and generators that are linear in the descriptor.

    Attributes:
        start: as in `Terms`.
        noise: as in `Terms`.
        drift: as in `Terms`, with a smaller factor.
        spread: descriptors from batches make steps longer; it vanishes with the number of rounds.
        bias: descriptors from batches change the mean step; all that remains after infinitely many rounds.
    """

    start: float
    noise: float
    drift: float
    spread: float
    bias: float

    @property
    def total(self) -> float:
        """The bound."""
        return sum(self)


def learning_rate(rounds: int, clients: int, steps: int) -> float:
    """Return the clients' learning rate of the theorem, β = 2√c / (k√T)."""
    return 2 * math.sqrt(clients) / (steps * math.sqrt(rounds))


def terms(constants: Constants, rounds: int, clients: int, steps: int, batch: float = math.inf) -> Terms:
    """Return the terms of the bound with corrected constants.

    Args:
        constants: the problem's constants.
        rounds: T, number of rounds; at least `least_rounds`.
        clients: c, number of clients per round, drawn without replacement.
        steps: k, number of local steps.
        batch: b, number of samples in a descriptor's batch; infinite if descriptors use all samples.

    Raises:
        PefllError: if there are too few rounds: the theorem does not hold then.
    """
    _check(constants, rounds, clients, steps, batch)
    least = least_rounds(constants, clients)
    if rounds < least:
        raise PefllError(
            f"the convergence bound needs at least {least:,} rounds for this problem with {clients} clients per round, "
            f"but there are {rounds:,}; give more rounds, or fewer clients per round",
            code="PEFLL-G301",
        )
    c = constants
    rate = math.sqrt(clients * rounds)
    # Rounds draw different clients, so a round of all n clients has no noise from the draw.
    left = 1.0 if math.isinf(c.clients) else (c.clients - clients) / max(1.0, c.clients - 1)
    return Terms(
        start=c.gap / rate,
        noise=8 * c.smoothness * (c.b2**2 * c.sigma1**2 + steps * left * c.gamma**2) / (steps * rate),
        drift=10 * clients * c.smooth1**2 * c.b2**2 * (c.b1**2 + c.sigma1**2) / rounds,
        jacobian=7.5 * c.b1**2 * c.sigma2**2 / batch,
        model=7.5 * c.smooth1**2 * c.b2**2 * c.sigma3**2 / batch,
    )


def printed_terms(constants: Constants, rounds: int, clients: int, steps: int, batch: float = math.inf) -> Terms:
    """Return the terms as the paper's main text prints them, for comparison: they do not follow from its proof."""
    _check(constants, rounds, clients, steps, batch)
    c = constants
    rate = math.sqrt(clients * rounds)
    return Terms(
        start=c.gap / rate,
        noise=c.smoothness * (6 * c.sigma1**2 + 4 * steps * c.gamma**2) / (steps * rate),
        drift=224 * clients * c.smooth1**2 * c.b1**2 * c.b2**2 / rounds,
        jacobian=8 * c.b1**2 * c.sigma2**2 / batch,
        model=14 * c.smooth1**2 * c.b2**2 * c.sigma3**2 / batch,
    )


def least_rounds(constants: Constants, clients: int) -> int:
    """Return the least T for which the corrected bound holds: β ≤ 1/(8Lk), so T ≥ 256 L² c."""
    return max(1, math.ceil(256 * constants.smoothness**2 * clients))


def least_rounds_of_the_paper(constants: Constants, clients: int, steps: int) -> int:
    """Return the least T for which the steps of the paper's proof hold.

    Its last simplification needs 56 L β k ≤ 1; with noisy gradients, it also needs 28 L_1² b_2² c k² β ≤ L.
    """
    c = constants
    needed = 56 * c.smoothness
    if c.sigma1 > 0:
        needed = max(needed, 28 * c.smooth1**2 * c.b2**2 * clients * steps / c.smoothness)
    return max(1, math.ceil(4 * clients * needed**2))  # 1 / (βk) = √T / (2√c) is at least `needed`


def sharper_terms(constants: Constants, rounds: int, clients: int, steps: int, batch: float = math.inf) -> SharperTerms:
    """Return the terms of a bound whose floor is of order 1/b², where the theorem has 1/b.

    It holds if client losses are quadratic, the generator depends linearly on the descriptor, and a batch's descriptor
    has the mean of the full one. Then errors of first order cancel in the mean of a step.

    Args:
        constants: as in `terms`.
        rounds: as in `terms`.
        clients: as in `terms`.
        steps: as in `terms`.
        batch: as in `terms`.
    """
    found, c = terms(constants, rounds, clients, steps, batch), constants
    error = (c.b1**2 * c.sigma2**2 + c.smooth1**2 * c.b2**2 * c.sigma3**2) / batch
    return SharperTerms(
        start=found.start,
        noise=found.noise,
        drift=22 / 30 * found.drift,
        spread=24 * c.smoothness * math.sqrt(clients / rounds) * error,
        bias=4 * squared_bias(c, batch),
    )


def squared_bias(constants: Constants, batch: float) -> float:
    """Return (L_1 σ_2 σ_3 / b)², a bound of the squared mean error of a local step that batches cause.

    See `sharper_terms` for its assumptions.
    """
    return (constants.smooth1 * constants.sigma2 * constants.sigma3 / batch) ** 2


def _check(constants: Constants, rounds: int, clients: int, steps: int, batch: float) -> None:
    """Raise PefllError for numbers that no training has."""
    for name, value in (("rounds", rounds), ("clients", clients), ("steps", steps), ("batch", batch)):
        if not value >= 1:
            raise PefllError(f"{name} is {value}; it must be at least 1", code="PEFLL-G302")
    if clients > constants.clients:
        raise PefllError(
            f"there are {clients} clients per round, but only {constants.clients:g} clients; give at most as many",
            code="PEFLL-G303",
        )
    for name, value in constants._asdict().items():
        if not value >= 0:
            raise PefllError(f"the constant {name} is {value}; it must be 0 or more", code="PEFLL-G304")
