"""Several runs on one device, in turns of one thread.

A run is a generator. It yields after it has launched work. So the other runs launch their work before any run waits for
a result, and on a GPU the kernels of one run fill the gaps of others. Each run has its own engine, and turns decide
only when something is computed. So each run has the same results as without the others.
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
    """Give the jobs turns, one after another, until all have ended; return each job's result.

    An error does not end the other jobs. A job's PefllError or `Stopped` is returned as its result.
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
        for job in jobs:  # after another error or a second Ctrl-C, jobs free their memory and files
            job.turns.close()
    return [outcomes[place] for place in range(len(jobs))]
