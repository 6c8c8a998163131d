"""What a new client pays for its personal model: messages, bytes, operations and seconds."""

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
from pefll.data.federation import TRAIN, Federation, check_is_federation
from pefll.engines.cohort import BaseCohort
from pefll.engines.serial import SerialEngine
from pefll.methods.contract import ClientState, Each, Everyone, Method, each


class Cost(NamedTuple):
    """What it costs to make the model of one new client; predictions with the model are not included.

    Attributes:
        exchanges: messages to the client, most of them with a reply.
        bytes_down: sent to the client.
        bytes_up: sent by the client.
        flops: floating point operations of convolutions and matrix products on the client.
        seconds: of all work, the server's included, on one core of this machine.
    """

    exchanges: int
    bytes_down: int
    bytes_up: int
    flops: int
    seconds: float


class NewClientCost(NamedTuple):
    """The fields of `Cost`, and how many training samples the client has."""

    exchanges: int
    bytes_down: int
    bytes_up: int
    flops: int
    seconds: float
    samples: int


def cost_of_median_client(method: Method[Any], federation: Federation, seed: int = 0) -> NewClientCost:
    """Return the cost for the unseen client with the median number of training samples.

    The method needs no training: the cost does not depend on the values of weights.
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
    """Make the model of one client that took no part in training, and return what that cost.

    A model that the server makes is sent to the client in one more message.

    Args:
        federation: has the client.
        method: what was trained.
        server: its state, on any device.
        client: its number, `federation.num_seen` or higher.
        seed: of the run.
    """
    check_is_federation(federation)
    client, seed = whole_number(client, "client", 0), whole_number(seed, "seed", 0)
    if not federation.num_seen <= client < federation.num_clients:
        raise PefllError(
            f"client {client} is not a new one; the numbers of new clients are {federation.num_seen} and higher",
            code="PEFLL-T103",
        )
    engine = SerialEngine(federation.to(torch.device("cpu")), method, seed, 0)
    state = map_tree(engine.cast, server)
    try:
        ((_, cohort),) = engine.cohorts(np.array([client]))
        counting = _FlopCountingCohort(cohort.anew())
        with torch.no_grad():
            _model_to_send(method, state, counting)  # before the clock starts: a first call is always slow
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
        self.flops += int(counter.get_total_flops())
        return replies
