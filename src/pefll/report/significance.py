"""A paired bootstrap over clients: is one method's lead over another more than chance?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pefll.core.errors import PefllError

Counts = npt.NDArray[np.int64]
RESAMPLES = 10_000
_AT_ONCE = 1000  # resamples in memory at a time


class Pair(NamedTuple):
    """The results of two methods on the same n clients, with the same seed."""

    samples: Counts  # [n], samples of each client
    ours: Counts  # [n], correct predictions of one method
    theirs: Counts  # [n], correct predictions of the other


class Difference(NamedTuple):
    """The difference between two methods' accuracies, in percentage points."""

    points: float  # mean over seeds
    low: float  # lower end of the 95% interval
    high: float  # upper end
    p: float  # two-sided p-value
    clients: int  # number of clients, added up over seeds
    seeds: int  # number of seeds


def paired_bootstrap(pairs: Sequence[Pair], resamples: int = RESAMPLES) -> Difference:
    """Return the difference of two methods' accuracies, with an interval from resampled clients.

    Clients are drawn with replacement, separately for each seed. A drawn client counts for both methods, so the
    comparison is paired. The interval covers the choice of clients. It does not cover the randomness of training,
    for which more seeds are needed.

    Args:
        pairs: counts of correct predictions, one pair for each seed.
        resamples: number of resamples; every call with the same number draws the same resamples.
    """
    if not pairs or any(len({len(part) for part in pair}) > 1 or not pair.samples.sum() for pair in pairs):
        raise PefllError(
            "a paired comparison needs the same clients for both methods, and at least one sample per seed",
            code="PEFLL-X010",
        )
    rng = np.random.default_rng(0)
    drawn = np.zeros(resamples)
    for pair in pairs:
        gain = pair.ours - pair.theirs
        for start in range(0, resamples, _AT_ONCE):
            size = min(_AT_ONCE, resamples - start)
            times = rng.multinomial(len(gain), np.full(len(gain), 1 / len(gain)), size=size)
            # If the drawn clients have no samples, the difference is 0.
            drawn[start : start + size] += 100 * (times @ gain) / np.maximum(times @ pair.samples, 1) / len(pairs)
    low, high = np.quantile(drawn, (0.025, 0.975))
    fewer = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
    return Difference(
        points=float(np.mean([100 * (pair.ours - pair.theirs).sum() / pair.samples.sum() for pair in pairs])),
        low=float(low),
        high=float(high),
        p=float(min(1.0, 2 * (fewer + 1) / (resamples + 1))),
        clients=sum(len(pair.samples) for pair in pairs),
        seeds=len(pairs),
    )
