"""Several runs on one device at once: one thread gives each a turn, and nobody waits while another has work to queue.

A run is a generator. It yields when it has given its device work to do, so that the others give it theirs before
anybody waits for a result. On a GPU the runs' kernels then fill each other's gaps. Each run computes what it would
compute alone: it has its own engine, and turns decide when something is computed, never what.
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
    """A run among others.

    Attributes:
        turns: the run.
        turn: returns a context to hold during each of its turns: its engine's.
    """

    turns: Turns[Any]
    turn: Callable[[], AbstractContextManager[Any]]


def round_robin(jobs: Sequence[ScheduledRun]) -> list[Any]:
    """Give each job a turn after the other until all have ended.

    Returns:
        What each job returned; or the PefllError or `Stopped` that it ended with, which does not keep the others from
        going on.
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
        for job in jobs:  # where one broke down or Ctrl-C came twice, the others put down what they hold
            job.turns.close()
    return [outcomes[place] for place in range(len(jobs))]
