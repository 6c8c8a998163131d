"""The cost of a new client's personal model: messages, bytes, operations and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from pefll.backend.flops import FlopCounter
from pefll.core.arguments import whole_number
from pefll.core.errors import PefllError
from pefll.core.tree import Tree, map_tree
from pefll.data.federation import Federation, check_is_federation
from pefll.data.samples import TRAIN
from pefll.engines.cohort import BaseCohort
from pefll.engines.serial import SerialEngine
from pefll.methods.contract import ClientState, Each, Everyone, Method, each


class Cost(NamedTuple):
    """The cost of making one new client's model. Predictions with the model are not included.

    Attributes:
        exchanges: number of messages to the client; most of them have a reply.
        bytes_down: bytes sent to the client.
        bytes_up: bytes sent by the client.
        flops: floating-point operations of convolutions and matrix products on the client.
        seconds: seconds of the client's and the server's work, on one core of this machine.
    """

    exchanges: int
    bytes_down: int
    bytes_up: int
    flops: int
    seconds: float


class NewClientCost(NamedTuple):
    """The fields of `Cost`, and the number of the client's training samples."""

    exchanges: int
    bytes_down: int
    bytes_up: int
    flops: int
    seconds: float
    samples: int


def cost_of_median_client(method: Method[Any], federation: Federation, seed: int = 0) -> NewClientCost:
    """Return the cost for the unseen client with the median number of training samples.

    The method need not be trained: the values of weights do not change the cost.
    """
    if not federation.num_unseen:
        raise PefllError("there are no unseen clients, so no new client's cost can be counted", code="PEFLL-T101")
    samples = federation.count[TRAIN].numpy(force=True)
    by_size = federation.num_seen + np.argsort(samples[federation.num_seen :], kind="stable")
    client = int(by_size[len(by_size) // 2])
    engine = SerialEngine(federation, method, seed, 1)
    try:
        server = engine.start()
    finally:
        engine.close()
    cost = cost_of_new_client(federation, method, server, client, seed)
    if not method.trains_in_rounds:  # there is no server
        cost = cost._replace(exchanges=0, bytes_down=0, bytes_up=0)
    return NewClientCost(*cost, int(samples[client]))


def cost_of_new_client(federation: Federation, method: Method[Any], server: Any, client: int, seed: int = 0) -> Cost:
    """Make the model of one client that took no part in training, and return its cost.

    If the server makes the model, one more message sends it to the client.

    Args:
        federation: the federation that has the client.
        method: the trained method.
        server: the method's state, on any device.
        client: the client's number, `federation.num_seen` or higher.
        seed: the run's seed.
    """
    check_is_federation(federation)
    client, seed = whole_number(client, "client", 0), whole_number(seed, "seed", 0)
    if not federation.num_seen <= client < federation.num_clients:
        raise PefllError(
            f"client {client} is not a new client; new clients have numbers from {federation.num_seen} on",
            code="PEFLL-T103",
        )
    engine = SerialEngine(federation.to(torch.device("cpu")), method, seed, 0)
    state = map_tree(engine.cast, server)
    try:
        ((_, cohort),) = engine.cohorts(np.array([client]))
        counting = _FlopCountingCohort(cohort.anew())
        with torch.no_grad():
            _model_to_send(method, state, counting)  # before the clock starts, because a first call is slow
            began = time.perf_counter()
            personal = _model_to_send(method, state, cohort)
            seconds = time.perf_counter() - began
    finally:
        engine.close()
    delivery = 0 if personal is None else cohort.bytes_to_send(each(personal))
    spent = cohort.ledger
    return Cost(spent.exchanges + (delivery > 0), spent.down + delivery, spent.up, counting.flops, seconds)


def _model_to_send(method: Method[Any], server: Any, cohort: Any) -> Tree | None:
    """Make the model of one client and return it; None if the client made it itself."""
    personal = method.personalize(server, cohort)
    make = getattr(method, "personal_module", None)
    if make is None:
        return personal
    make(cohort, personal)
    return None


class _FlopCountingCohort:
    """A cohort that also counts the floating point operations of its clients."""

    def __init__(self, cohort: BaseCohort) -> None:
        self._cohort = cohort
        self.size, self.ids, self.is_new = cohort.size, cohort.ids, cohort.is_new
        self.keep = cohort.keep
        self.flops = 0

    def run(self, task: Callable[..., Tree], *arguments: Everyone | Each | ClientState, **static: int) -> Tree:
        with FlopCounter() as counter:
            replies = self._cohort.run(task, *arguments, **static)
        self.flops += counter.total
        return replies
