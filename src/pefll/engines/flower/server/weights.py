"""Limits on a client's weight in a mean over samples. The server cannot check how many samples a client has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pefll.engines.flower.server.terms import Report, Terms


class WeightLimits:
    """Limits each client's weight in a mean to a multiple of the median client's weight.

    Args:
        terms: has the `sample_limit`.
        name_of: returns a client's name.
        report: called with a sentence when a weight is reduced, once for each client and use.
    """

    def __init__(self, terms: Terms, name_of: Callable[[int], str], report: Report) -> None:
        self._terms, self._name_of, self._report = terms, name_of, report
        self._told: set[tuple[int, str]] = set()

    def limited(self, declared: Mapping[int, float], times: float, use: str) -> dict[int, float]:
        """Return the limited number of samples of each client.

        The median is over clients with samples. For an even number of clients it is the lower of the two middle values.
        So, of two clients, the smaller one limits the larger one.

        Args:
            declared: the number of samples that each client says it has.
            times: the limit, in multiples of the median; 0 for no such limit.
            use: the purpose of the mean, as the end of a sentence.
        """
        most = self._most(declared, times)
        counts: dict[int, float] = {}
        for client, samples in declared.items():
            counts[client] = min(samples, most)
            if samples > most and (client, use) not in self._told:
                self._told.add((client, use))  # without the number, because a client could declare a new one each time
                self._report(
                    f"{self._name_of(client)} says that it has {samples:,.0f} samples; it counts for {most:,.0f} {use}"
                )
        return counts

    def _most(self, declared: Mapping[int, float], times: float) -> float:
        """Return the largest number of samples that a client may count as: a whole number, or infinity."""
        some = sorted(samples for samples in declared.values() if samples > 0)
        limits = [self._terms.sample_limit or math.inf]
        if some and times:
            limits.append(times * some[(len(some) - 1) // 2])
        most = min(limits)
        return most if math.isinf(most) else float(max(1, math.floor(most)))
