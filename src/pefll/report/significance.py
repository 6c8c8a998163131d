"""Paired comparisons over clients: is one method's lead over another more than chance?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pefll.core.errors import PefllError

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
RESAMPLES = 10_000
_AT_ONCE = 1000  # most resamples in memory at a time
_IN_MEMORY = 10_000_000  # most numbers of resamples in memory at a time
SURE = 0.05  # largest p-value of a difference that is called one
# With fewer clients that differ, no p-value is below SURE: of 2^5 signs, 2 are as extreme as the observed ones.
LEAST_CLIENTS = 6
_EXACT = 14  # most clients whose signs are all tried


class Pair(NamedTuple):
    """The results of two methods on the same n clients, with the same seed.

    In several pairs, a client has the same place in each. A seed without this client has no samples for it.
    """

    samples: Counts  # [n], samples of each client
    ours: Counts | Floats  # [n], sums of one method over each client's samples, such as correct predictions
    theirs: Counts | Floats  # [n], sums of the other


class Difference(NamedTuple):
    """The difference between two methods' figures; of accuracies and other shares in percentage points."""

    points: float  # mean over seeds
    low: float  # lower end of the 95% interval; -inf if there are too few clients for one
    high: float  # upper end; inf if there are too few clients for one
    p: float  # two-sided p-value
    clients: int  # number of clients; the bootstrap adds them up over seeds
    seeds: int  # number of seeds


def sign_flip_test(pairs: Sequence[Pair], scale: float = 100.0) -> Difference:
    """Return the difference of two methods' means over samples, such as accuracies.

    Its test and its interval hold for few clients, too.

    If two methods are equally good, each client's difference could as well have the other sign. The p-value is the
    share of all choices of signs that give a difference at least as large as the observed one. The difference of a
    client that is in several seeds is averaged over them before, so that a client is one unit. The interval has the
    differences that this test does not refuse. The test covers the choice of clients. It does not cover the randomness
    of training.

    With at most 14 clients that have samples, all signs are tried, and otherwise 10,000 random ones. These are the same
    in every call.

    Args:
        pairs: such as counts of correct predictions, one pair for each seed. A seed with fewer clients lacks the last
            ones.
        scale: what the difference is multiplied by: 100 for per cent.
    """
    _check(pairs)
    clients = max(len(pair.samples) for pair in pairs)
    gain, weight = np.zeros(clients), np.zeros(clients)  # each client's part of the difference, and of the samples
    for pair in pairs:
        size, total = len(pair.samples), pair.samples.sum() * len(pairs)
        gain[:size] += scale * (pair.ours - pair.theirs) / total
        weight[:size] += pair.samples / total
    gain, weight = gain[weight > 0], weight[weight > 0]
    points = float(gain.sum())
    ends = [np.array([[-np.inf], [np.inf]])]  # of the observed signs, which are one choice
    for signs in _signs(len(gain)):
        flipped, part = signs @ gain, signs @ weight
        # A choice of signs is as extreme as the observed one for each true difference that is between the mean
        # difference of the clients with one sign and that of the others.
        apart = np.abs(part) < 1 - 1e-12  # else all clients have one sign, which is as extreme whatever is true
        both = np.array([np.full(len(signs), -np.inf), np.full(len(signs), np.inf)])
        both[0, apart] = (points + flipped[apart]) / (1 + part[apart])
        both[1, apart] = (points - flipped[apart]) / (1 - part[apart])
        ends.append(np.sort(both, axis=0))
    low, high = np.concatenate(ends, axis=1)
    near = 1e-9 * np.abs(gain).sum()  # equal differences may differ by rounding
    count, refused = len(low), int(SURE * len(low))
    return Difference(
        points=points,
        # The interval ends where more than 5% of the choices are as extreme as the observed one.
        low=float(np.partition(low, refused)[refused]),
        high=float(-np.partition(-high, refused)[refused]),
        p=float(np.count_nonzero((low <= near) & (high >= -near)) / count),
        clients=len(gain),
        seeds=len(pairs),
    )


def root_mean_test(pairs: Sequence[Pair], scale: float = 1.0) -> Difference:
    """Return the difference of two methods' roots of means, such as RMSE, with a test and a bootstrap interval.

    The p-value is that of `sign_flip_test`: the other sign of a client's difference exchanges the client's sums. A root
    of a mean is no sum over clients, so that this test has no simple interval. The interval is from resampled clients:
    a drawn client counts for both methods and in all seeds. It needs as many clients as the test.

    Args:
        pairs: sums of squares, one pair for each seed. A seed with fewer clients lacks the last ones.
        scale: what the difference is multiplied by.
    """
    _check(pairs)
    clients = max(len(pair.samples) for pair in pairs)
    samples, ours, theirs = (
        np.stack([np.pad(np.asarray(part, np.float64), (0, clients - len(part))) for part in parts])
        for parts in zip(*pairs, strict=True)
    )  # [seeds, clients] each
    there = samples.sum(axis=0) > 0
    samples, ours, theirs = samples[:, there], ours[:, there], theirs[:, there]

    def difference(ours: Floats, theirs: Floats, samples: Floats) -> Floats:
        """Return the difference, mean over the seeds with samples, of sums [seeds, choices]."""
        mine, its = (np.sqrt(np.maximum(sums, 0) / np.maximum(samples, 1)) for sums in (ours, theirs))
        found: Floats = scale * (mine - its).sum(axis=0) / np.maximum((samples > 0).sum(axis=0), 1)
        return found

    every, total = np.ones((len(ours[0]), 1)), (ours + theirs).sum(axis=1, keepdims=True)
    points = float(difference(ours @ every, theirs @ every, samples @ every)[0])
    extreme = count = 1  # the observed signs are one choice
    for signs in _signs(len(every)):
        lead = (ours - theirs) @ signs.T
        flipped = difference((total + lead) / 2, (total - lead) / 2, samples @ every)
        near = abs(points) * (1 - 1e-9)  # equal differences may differ by rounding
        extreme += int(np.count_nonzero(np.abs(flipped) >= near))
        count += len(signs)
    low, high = -np.inf, np.inf
    if len(every) >= LEAST_CLIENTS:
        rng, drawn = np.random.default_rng(0), []
        for size in _sizes(len(every)):
            # Client i in draw k is k * clients + i. `rng.multinomial` takes about twice as long.
            places = rng.integers(len(every), size=(size, len(every))) + len(every) * np.arange(size)[:, None]
            times = np.bincount(places.ravel(), minlength=places.size).reshape(places.shape).T.astype(np.float64)
            drawn.append(difference(ours @ times, theirs @ times, samples @ times))
        low, high = np.quantile(np.concatenate(drawn), (0.025, 0.975))
    return Difference(points, float(low), float(high), float(extreme / count), len(every), len(pairs))


def _signs(n: int) -> Iterator[Floats]:
    """Yield signs [choices, n], without the observed ones (all 1): all that matter of few clients, else random ones.

    The opposite of a choice of signs is as extreme, so that the first client's sign is always 1.
    """
    if n <= _EXACT:
        every = np.array(list(itertools.product((1.0, -1.0), repeat=max(n - 1, 0)))).reshape(2 ** max(n - 1, 0), -1)
        yield np.concatenate([np.ones((len(every), 1)), every], axis=1)[1:, :n]
        return
    rng = np.random.default_rng(0)
    for size in _sizes(n):
        yield rng.choice((1.0, -1.0), size=(size, n))


def _sizes(clients: int) -> list[int]:
    """Return how many resamples of some clients to make at a time, all `RESAMPLES` in total."""
    most = max(1, min(_AT_ONCE, _IN_MEMORY // clients))
    return [min(most, RESAMPLES - start) for start in range(0, RESAMPLES, most)]


def paired_bootstrap(pairs: Sequence[Pair], resamples: int = RESAMPLES) -> Difference:
    """Return the difference of two methods' accuracies, with an interval from resampled clients.

    Clients are drawn with replacement, separately for each seed. A drawn client counts for both methods, so the
    comparison is paired. The interval covers the choice of clients. It does not cover the randomness of training,
    for which more seeds are needed.

    Args:
        pairs: counts of correct predictions, one pair for each seed.
        resamples: number of resamples; every call with the same number draws the same resamples.
    """
    _check(pairs)
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


def _check(pairs: Sequence[Pair]) -> None:
    """Raise PefllError if the results of two methods are no pairs."""
    if not pairs or any(len({len(part) for part in pair}) > 1 or not pair.samples.sum() for pair in pairs):
        raise PefllError(
            "a paired comparison needs the same clients for both methods, and at least one sample per seed",
            code="PEFLL-X010",
        )
