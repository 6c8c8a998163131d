"""Whether one method's lead over another is more than luck with the clients: a paired bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pefll.core.errors import PefllError

Counts = npt.NDArray[np.int64]
RESAMPLES = 10_000
_AT_ONCE = 1000  # resamples that are in memory together


class Pair(NamedTuple):
    """Two methods on the same clients, with the same seed.

    Attributes:
        samples: [n] of each client.
        ours: [n] how many of them one method has right.
        theirs: [n] how many the other has right.
    """

    samples: Counts
    ours: Counts
    theirs: Counts


class Difference(NamedTuple):
    """How far one method is ahead of another.

    Attributes:
        points: percentage points, the mean over seeds.
        low: lower end of the 95% interval.
        high: upper end.
        p: the share of resamples that contradict the lead, of both sides; below 0.05 it is unlikely to be luck.
        clients: how many there are, those of all seeds together.
        seeds: how many.
    """

    points: float
    low: float
    high: float
    p: float
    clients: int
    seeds: int


def paired_bootstrap(pairs: Sequence[Pair], resamples: int = RESAMPLES) -> Difference:
    """Draw clients anew, with replacement, and see how the difference of two methods' accuracies varies.

    Clients of a seed are drawn among themselves, and a client brings the answers of both methods along. What varies is
    who the clients are: luck with the training, which a few seeds cannot show, is not in the interval.

    Args:
        pairs: one for each seed.
        resamples: how many; the same ones are drawn every time.
    """
    if not pairs or any(len({len(part) for part in pair}) > 1 or not pair.samples.sum() for pair in pairs):
        raise PefllError(
            "a paired comparison needs the same clients, with samples, for both methods", code="PEFLL-X010"
        )
    rng = np.random.default_rng(0)
    drawn = np.zeros(resamples)
    for pair in pairs:
        gain = pair.ours - pair.theirs
        for start in range(0, resamples, _AT_ONCE):
            size = min(_AT_ONCE, resamples - start)
            times = rng.multinomial(len(gain), np.full(len(gain), 1 / len(gain)), size=size)
            # A draw of clients without any sample has no accuracy; it counts as no difference.
            drawn[start : start + size] += 100 * (times @ gain) / np.maximum(times @ pair.samples, 1) / len(pairs)
    low, high = np.quantile(drawn, (0.025, 0.975))
    fewer = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
    return Difference(
        points=float(np.mean([100 * (pair.ours - pair.theirs).sum() / pair.samples.sum() for pair in pairs])),
        low=float(low),
        high=float(high),
        p=min(1.0, 2 * (fewer + 1) / (resamples + 1)),
        clients=sum(len(pair.samples) for pair in pairs),
        seeds=len(pairs),
    )
