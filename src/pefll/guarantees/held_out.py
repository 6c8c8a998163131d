"""Guarantees from held-out data: about new clients from unseen clients, about one client from its own samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.wording import argument, counted
from pefll.guarantees import intervals
from pefll.guarantees.binomial import (
    clopper_pearson_lower,
    clopper_pearson_upper,
    least_clients_for_share,
    tolerance_rank,
)
from pefll.guarantees.intervals import Array, checked_delta, checked_share, checked_values
from pefll.guarantees.statement import Statement

_METHODS = {"betting": "betting interval", "bernstein": "empirical Bernstein", "hoeffding": "Hoeffding"}
CLIENTS = (
    "The unseen clients and the new client are drawn independently from the same environment, nothing was chosen with "
    "the unseen clients, and their test samples made no descriptor."
)
# Levels of a single client's limit, the first with enough clients is used. Simulated Beta environments chose them.
LEVELS = (1 / 2, 1 / 4, 1 / 10)
SAMPLES = (
    "The samples are drawn independently from the client's own distribution, and none of them made the model: not its "
    "descriptor, not its training, not a choice between models."
)


def mean_statements(values: Any, delta: float, metric: str = "accuracy") -> list[Statement]:
    """Return the bounds below the expected metric of a new client, the certificate first.

    Args:
        values: [n] the metric of each unseen client on its own test samples, between 0 and 1; each client counts once.
        delta: the probability with which a bound fails.
        metric: the name of the metric.
    """
    known, delta = checked_values(values), checked_delta(delta)
    return [_mean(known, delta, name, bound, metric) for name, bound in intervals.LOWER_BOUNDS.items()]


def _mean(values: Array, delta: float, name: str, lower: Callable[[Any, float], float], metric: str) -> Statement:
    bound, both = lower(values, delta), intervals.interval(values, delta, name)
    return Statement(
        name=f"mean-{name}",
        title=f"mean {metric}, {_METHODS[name]}",
        measured=float(values.mean()),
        bound=bound,
        lower=True,
        confidence=1 - delta,
        promise=f"The expected {metric} of a new client is at least {at_least(bound)}.",
        assumes=CLIENTS,
        terms={
            "clients": len(values),
            "deviation": float(values.std(ddof=1)),
            "two_sided_lower": both.lower,
            "two_sided_upper": both.upper,
        },
    )


def measured_share(values: Any, delta: float, share: float, metric: str = "accuracy") -> Statement:
    """Return the bound that at least `share` of new clients reach in a test like that of the unseen clients.

    Raises:
        PefllError: if there are too few unseen clients.
    """
    known, delta = checked_values(values), checked_delta(delta)
    share = checked_share(share, "the share of clients")
    rank = _rank(len(known), share, share, delta)
    bound = float(np.sort(known)[rank - 1])
    return Statement(
        name="share-measured",
        title=f"measured {metric} of {percent(share)} of clients",
        measured=_reached(known, share),
        bound=bound,
        lower=True,
        confidence=1 - delta,
        promise=f"At least {percent(share)} of new clients have a measured {metric} of at least {at_least(bound)}, on "
        "as many test samples.",
        assumes=CLIENTS,
        terms={"clients": len(known), "share": share, "rank": rank},
    )


def true_share(samples: Any, correct: Any, delta: float, share: float) -> Statement:
    """Return the bound that the true accuracies of at least `share` of new clients reach.

    A client's limit L is Clopper-Pearson's at level ε, which is fixed by the number of clients alone. A client with an
    accuracy below y has L < y with probability at least 1 - ε, so P(accuracy < y) <= P(L < y) / (1 - ε) for a random
    client. The order statistics of L bound P(L < y) by (1 - share)(1 - ε).

    Args:
        samples: [n] test samples of each unseen client, at least 1.
        correct: [n] how many of them are classified correctly.
        delta: the probability with which the bound fails.
        share: the share of new clients, between 0 and 1.

    Raises:
        PefllError: if there are too few unseen clients.
    """
    delta, share = checked_delta(delta), checked_share(share, "the share of clients")
    samples, correct = checked_counts(samples, correct)
    of_limits = {level: 1 - (1 - share) * (1 - level) for level in LEVELS}
    level = next((one for one in LEVELS if tolerance_rank(len(samples), of_limits[one], delta)), LEVELS[-1])
    rank = _rank(len(samples), of_limits[level], share, delta)
    limits = clopper_pearson_lower(correct, samples, level)
    bound = float(np.sort(limits)[rank - 1])
    return Statement(
        name="share-true",
        title=f"true accuracy of {percent(share)} of clients",
        measured=_reached(correct / samples, share),
        bound=bound,
        lower=True,
        confidence=1 - delta,
        promise=f"At least {percent(share)} of new clients have a true accuracy of at least {at_least(bound)}, however "
        "many test samples they have.",
        assumes=f"{CLIENTS} A client's test samples are drawn independently from its own distribution.",
        terms={"clients": len(samples), "share": share, "rank": rank, "level_per_client": level},
    )


def accuracy_statement(correct: int, samples: int, delta: float) -> Statement:
    """Return the Clopper-Pearson bound below the accuracy of one client's model, from its own labelled samples."""
    delta = checked_delta(delta)
    if samples < 1:
        raise PefllError("there is no labelled sample; a guarantee needs at least one", code="PEFLL-G108")
    found, right = checked_counts([samples], [correct])
    bound = float(clopper_pearson_lower(right, found, delta)[0])
    return Statement(
        name="client-accuracy",
        title="accuracy of this model",
        measured=correct / samples,
        bound=bound,
        lower=True,
        confidence=1 - delta,
        promise=f"The model's accuracy on new samples of this client is at least {at_least(bound)}.",
        assumes=SAMPLES,
        terms={
            "samples": samples,
            "correct": correct,
            "two_sided_lower": float(clopper_pearson_lower(right, found, delta / 2)[0]),
            "two_sided_upper": float(clopper_pearson_upper(right, found, delta / 2)[0]),
        },
    )


def checked_counts(samples: Any, correct: Any) -> tuple[Array, Array]:
    """Return counts of clients [n] in float64; PefllError unless they are whole and 0 <= correct <= samples."""
    found, right = np.asarray(samples, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    whole = found.shape == right.shape and found.ndim == 1 and bool(((found % 1 == 0) & (right % 1 == 0)).all())
    if not whole or not bool(((found >= 1) & (right >= 0) & (right <= found)).all()):  # NaN and infinity fail, too
        raise PefllError(
            "the counts of the unseen clients must be whole numbers with 0 <= correct <= samples for each client; "
            "score the run again",
            code="PEFLL-G109",
        )
    return found, right


def percent(share: float) -> str:
    """Return a share in per cent with up to two digits after the point, such as `"90%"` or `"92.5%"`."""
    return f"{round(100 * share, 2):g}%"


def at_least(bound: float) -> str:
    """Return a lower bound in per cent, rounded down, so that the text never promises more than the bound."""
    return f"{math.floor(1000 * bound + 1e-9) / 10:.1f}%"


def _reached(values: Array, share: float) -> float:
    """The value that at least `share` of the measured values reach."""
    return float(np.sort(values)[len(values) - math.ceil(share * len(values) - 1e-9)])


def _rank(clients: int, share: float, asked: float, delta: float) -> int:
    """Return the rank of the order statistic that bounds a share; PefllError if there are too few clients."""
    rank = tolerance_rank(clients, share, delta)
    if not rank:
        needed = least_clients_for_share(share, delta)
        raise PefllError(
            f"a bound for {percent(asked)} of new clients with confidence {percent(1 - delta)} needs {needed} unseen "
            f"clients, but there are {clients}; use a smaller {argument('share')}, or test "
            f"{counted(needed - clients, 'more client')}",
            code="PEFLL-G110",
        )
    return rank
