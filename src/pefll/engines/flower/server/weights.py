"""Limits on how much one client counts in a mean over samples: nobody can check how many samples it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pefll.engines.flower.server.terms import Report, Terms


class WeightLimits:
    """Limits each client's weight in a mean to a multiple of the median client's.

    Args:
        terms: have `sample_limit`.
        name_of: returns a client's name.
        report: gets a sentence when a limit acts, once for each client and use.
    """

    def __init__(self, terms: Terms, name_of: Callable[[int], str], report: Report) -> None:
        self._terms, self._name_of, self._report = terms, name_of, report
        self._told: set[tuple[int, str]] = set()

    def limited(self, declared: Mapping[int, float], times: float, use: str) -> dict[int, float]:
        """Return for how many samples each client counts.

        The median is that of the clients with samples. Of an even number it is the lower one: the smaller of two
        clients limits the larger one.

        Args:
            declared: samples by client.
            times: the limit, in multiples of the median; 0 for no such limit.
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
        """Return the most samples that a client counts for: a whole number, or infinity."""
        some = sorted(samples for samples in declared.values() if samples > 0)
        limits = [self._terms.sample_limit or math.inf]
        if some and times:
            limits.append(times * some[(len(some) - 1) // 2])
        most = min(limits)
        return most if math.isinf(most) else float(max(1, math.floor(most)))
