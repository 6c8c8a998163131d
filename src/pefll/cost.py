"""What a client that was never seen pays for its personal model: exchanges, bytes, work on the device, time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pefll.data.federation import TRAIN, Federation
from pefll.engines.cohort import Ids, Ledger
from pefll.engines.serial import SerialEngine
from pefll.errors import PefllError
from pefll.methods.contract import Each, Everyone, Method
from pefll.tree import Tree, leaves

QUICK_SECONDS, REPEATS = 1.0, 5


class NewClientCost(NamedTuple):
    """What making a personal model for one new client costs that client; predicting with it is not included.

    Attributes:
        exchanges: round trips between the client and the server.
        bytes_down: sent to the client.
        bytes_up: sent by the client.
        flops: floating point operations on the client's device, of convolutions and products of matrices.
        seconds: that the client's own work takes on one core of this machine.
        samples: training samples that the client has.
    """

    exchanges: int
    bytes_down: int
    bytes_up: int
    flops: int
    seconds: float
    samples: int


def cost_of_new_client(method: Method[Any], federation: Federation, seed: int = 0) -> NewClientCost:
    """Personalise for the unseen client with the median number of training samples, and count.

    No trained weights are needed: what is sent and computed does not depend on their values.

    Args:
        method: with its hyper-parameters.
        federation: has the client.
        seed: of everything random.
    """
    if not federation.num_unseen:
        raise PefllError("there are no unseen clients, so there is nobody whose cost could be counted")
    samples = federation.count[TRAIN].numpy(force=True)
    by_size = federation.num_seen + np.argsort(samples[federation.num_seen :], kind="stable")
    client = by_size[len(by_size) // 2 : len(by_size) // 2 + 1]
    meter = _Meter(federation, method, seed)
    try:
        server = meter.start()
        with meter.counting():
            personal, ledger = _personalize(meter, method, server, client)
        # A simulator hands every reply to the server and every model to the client; a client keeps what it has.
        made = sum(leaf.nbytes for leaf in leaves(personal) if _held(leaf, meter.replies))
        new = sum(leaf.nbytes for leaf in leaves(personal) if not _held(leaf, meter.replies + meter.arguments))
        seconds = _seconds(meter, method, server, client)
    finally:
        meter.close()
    if not method.trains_in_rounds:  # there is no server
        return NewClientCost(0, 0, 0, meter.flops, seconds, int(samples[client[0]]))
    return NewClientCost(
        exchanges=ledger.exchanges + bool(new),
        bytes_down=ledger.down + new,
        bytes_up=ledger.up - made,
        flops=meter.flops,
        seconds=seconds,
        samples=int(samples[client[0]]),
    )


@torch.no_grad()
def _personalize(engine: SerialEngine, method: Method[Any], server: Tree, client: Ids) -> tuple[Tree, Ledger]:
    """Return the model of one client and what crossed the door for it."""
    ((_, cohort),) = engine.cohorts(client)
    personal: Tree = method.personalize(server, cohort)
    return personal, cohort.ledger


def _held(leaf: Tensor, others: list[Tensor]) -> bool:
    """Whether a tensor is, or is a view of, one of some others."""
    place = leaf.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == place for other in others)


def _seconds(meter: _Meter, method: Method[Any], server: Tree, client: Ids) -> float:
    """Return the seconds of the client's own work: the median of several times, or one time where that is long."""
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < QUICK_SECONDS:
        meter.seconds = 0.0
        _personalize(meter, method, server, client)
        times.append(meter.seconds)
    return statistics.median(times)


class _Meter(SerialEngine):
    """A serial engine that counts what its clients compute and remembers what they were sent and replied.

    Attributes:
        flops: of the clients' work while counting.
        seconds: that the clients' work took.
        arguments: what clients were sent while counting.
        replies: what they replied while counting.
    """

    def __init__(self, federation: Federation, method: Method[Any], seed: int) -> None:
        super().__init__(federation, method, seed, clients_per_round=1)
        self.flops, self.seconds = 0, 0.0
        self.arguments: list[Tensor] = []
        self.replies: list[Tensor] = []
        self._counts = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside the block. Counting is slow, so that it is not done while the clock is read."""
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def run_here(
        self,
        task: Callable[..., Tree],
        ids: Ids,
        round_: int,
        arguments: list[Everyone | Each],
        static: dict[str, int],
    ) -> Tree:
        """Run a task on some clients and return the replies with a leading client axis."""
        if not self._counts:
            started = time.perf_counter()
            replies = super().run_here(task, ids, round_, arguments, static)
            self.seconds += time.perf_counter() - started
            return replies
        with FlopCounterMode(display=False) as counter:
            replies = super().run_here(task, ids, round_, arguments, static)
        self.flops += counter.get_total_flops()
        self.arguments += [leaf for argument in arguments for leaf in leaves(argument.value)]
        self.replies += list(leaves(replies))
        return replies
