"""PAC-Bayes bounds on the loss of future clients: Theorem 3.2 of the paper, and tighter bounds that are like it.

A method with random parameters A ~ Q makes a model A(S) from a client's samples S. All losses are between 0 and 1.
`KL(Q||P)` measures how far Q is from a prior P, which does not depend on the clients of the bound. The derivations are
in docs/theory.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pefll.core.errors import PefllError
from pefll.guarantees.intervals import kl_upper_inverse

# What statements assume beside independent clients.
NO_SEARCH = "nor on hyper-parameters, as in a search that scores seen clients"
FIXED = "and what scales or encodes inputs counts as fixed"


def gaussian_kl(squared_distance: float, alpha: float) -> float:
    """KL(N(a, α Id) || N(b, α Id)) = ‖a - b‖² / 2α; the appendix of the paper has α‖a - b‖², which is an erratum."""
    if squared_distance < 0 or alpha <= 0:
        raise PefllError(
            f"a squared distance is {squared_distance} and a variance is {alpha}; the first must be at least 0 and the "
            "second more than 0",
            code="PEFLL-G201",
        )
    return squared_distance / (2 * alpha)


def environment_term(kl: float, clients: int, delta: float) -> float:
    """The first square root of Theorem 3.2: √((KL(Q||P) + log(4√n/δ)) / 2n) for n seen clients.

    With probability 1 - δ/2, future clients have at most this much more loss than the seen ones, for all Q.
    """
    check(delta, clients)
    return math.sqrt((kl + math.log(4 * math.sqrt(clients) / delta)) / (2 * clients))


def sample_term(kl: float, clients: int, samples: float, delta: float) -> float:
    """The second square root of Theorem 3.2: √((KL + log(8mn/δ) + 1) / 2mn) for n clients with m samples each.

    With probability 1 - δ/2, new samples of the seen clients have at most this much more loss than their training
    samples, for all models. If clients have different numbers of samples, m is their harmonic mean.

    Args:
        kl: the sum over clients of KL(A(S_i)||P), from the models' distributions to their prior.
        clients: n.
        samples: m.
        delta: δ.
    """
    check(delta, clients, samples)
    total = samples * clients
    return math.sqrt((kl + math.log(8 * total / delta) + 1) / (2 * total))


def harmonic_mean(samples: Sequence[int]) -> float:
    """The number m for which the mean over clients of 1/m_i is 1/m; it replaces m if clients have unequal numbers."""
    if len(samples) == 0 or min(samples) < 1:
        raise PefllError("each client needs at least one sample; leave out clients without", code="PEFLL-G202")
    return len(samples) / sum(1 / each for each in samples)


def monte_carlo_bound(mean: float, draws: int, delta: float) -> float:
    """An upper bound for an expectation: the largest q with kl(mean||q) <= log(1/δ) / draws.

    Holds with probability 1 - δ over the draws, which must be independent, and may have different expectations. Then q
    bounds the mean of these.
    """
    check(delta, draws)
    return kl_upper_inverse(mean, math.log(1 / delta) / draws)


def client_bound(loss: float, kl: float, clients: int, delta: float) -> float:
    """The largest q with kl(loss||q) <= (KL(Q||P) + log(2√n/δ)) / n (Maurer 2004), for n clients.

    With probability 1 - δ, q bounds the expected loss of a future client, for all Q.

    Args:
        loss: the mean over clients of their expected losses under Q, or an upper bound of it.
        kl: KL(Q||P).
        clients: n. None of them had influence on P.
        delta: δ.
    """
    check(delta, clients)
    return kl_upper_inverse(min(loss, 1.0), (kl + math.log(2 * math.sqrt(clients) / delta)) / clients)


def check(delta: float, *counts: float) -> None:
    """Raise PefllError unless δ is between 0 and 1, and all counts are at least 1."""
    if not 0 < delta < 1:
        raise PefllError(f"delta is {delta}; it must be above 0 and below 1, for example 0.05", code="PEFLL-G203")
    if min(counts, default=1) < 1:
        raise PefllError(f"a bound for {min(counts)} clients or samples says nothing; give at least 1", "PEFLL-G204")
