"""Several runs on one device, in turns of one thread.

A run is a generator. It yields after it has launched work, so that the other runs launch theirs before any run waits
for a result. On a GPU, the runs' kernels then fill each other's gaps. Each run has its own engine, and turns decide
only when something is computed. So each run computes what it would compute alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from pefll.core.errors import PefllError
from pefll.core.signals import Stopped
from pefll.core.wording import either

T = TypeVar("T")
Turns: TypeAlias = Generator[None, None, T]


class ScheduledRun(NamedTuple):
    """A run, and a function that makes the context for each of its turns."""

    turns: Turns[Any]
    turn: Callable[[], AbstractContextManager[Any]]


def round_robin(jobs: Sequence[ScheduledRun]) -> list[Any]:
    """Give each job a turn after the other until all have ended; return what each job returned.

    An error does not end the other jobs: the PefllError or `Stopped` of a job is returned in its place.
    """
    outcomes: dict[int, Any] = {}
    try:
        while len(outcomes) < len(jobs):
            for place, job in enumerate(jobs):
                if place not in outcomes:
                    try:
                        with job.turn():
                            next(job.turns)
                    except StopIteration as end:
                        outcomes[place] = end.value
                    except (PefllError, Stopped) as error:
                        outcomes[place] = error
                    except torch.OutOfMemoryError:
                        outcomes[place] = PefllError(
                            "the GPU's memory is full: train fewer seeds at once, or fewer clients a round; "
                            f"{either('`--resume`', 'the same folder as out')} goes on from the last checkpoint",
                            code="PEFLL-T116",
                        )
    finally:
        for job in jobs:  # after another error or a second Ctrl-C, the others free what they hold
            job.turns.close()
    return [outcomes[place] for place in range(len(jobs))]
