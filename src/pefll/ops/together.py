"""How many runs share a launch: kernels split their sums as they would for one run alone, so that its numbers stay.

A plain variable, not one of a thread or a context: backward passes run in threads of autograd's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_runs = 1


@contextmanager
def clients_of(runs: int) -> Iterator[None]:
    """Say that what the block launches has the clients of several runs, equally many of each, along its axis."""
    global _runs
    before, _runs = _runs, runs
    try:
        yield
    finally:
        _runs = before


def of_one_run(clients: int) -> int:
    """Return how many of the clients of a launch are one run's."""
    return max(1, clients // _runs)
