"""How much one client may count for in a mean over samples: what it declares about itself is only its word."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pefll.engines.flower.server.terms import Report, Terms


class WeightLimits:
    """Keeps every client's weight in a mean near the median client's.

    Args:
        terms: `sample_limit`, and who asks names `weight_limit` or `choice_limit`.
        name_of: what a client is called.
        report: is told, in a sentence, when a limit acts; once for each client and use.
    """

    def __init__(self, terms: Terms, name_of: Callable[[int], str], report: Report) -> None:
        self._terms, self._name_of, self._report = terms, name_of, report
        self._told: set[tuple[int, str]] = set()

    def limited(self, declared: Mapping[int, float], times: float, use: str) -> dict[int, float]:
        """Return for how many samples each client counts.

        The median is that of the clients with samples in this mean, the lower of two: among two clients the larger one
        is limited by the smaller one.

        Args:
            declared: samples by client.
            times: how many times the median a client may count for; 0 for no such limit.
            use: what the mean is for, as the end of a sentence.
        """
        most = self._most(declared, times)
        counts: dict[int, float] = {}
        for client, samples in declared.items():
            counts[client] = min(samples, most)
            if samples > most and (client, use) not in self._told:
                self._told.add((client, use))  # not the number: a client could declare a new one each time
                self._report(
                    f"{self._name_of(client)} says that it has {samples:,.0f} samples; it counts for {most:,.0f} {use}"
                )
        return counts

    def _most(self, declared: Mapping[int, float], times: float) -> float:
        """Return the most samples that a client of a mean counts for: a whole number, or infinity."""
        some = sorted(samples for samples in declared.values() if samples > 0)
        limits = [self._terms.sample_limit or math.inf]
        if some and times:
            limits.append(times * some[(len(some) - 1) // 2])
        most = min(limits)
        return most if math.isinf(most) else float(max(1, math.floor(most)))
