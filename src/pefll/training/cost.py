"""What a client that was never seen pays for its personal model, counted from result files: no weights are needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pefll.core.errors import PefllError
from pefll.data.federation import TRAIN, Federation
from pefll.engines.serial import SerialEngine
from pefll.methods.contract import Method
from pefll.training import evaluation


class NewClientCost(NamedTuple):
    """What making a personal model for one new client costs that client; predicting with it is not included.

    Attributes:
        exchanges: messages down to the client, most of them answered.
        bytes_down: sent to the client.
        bytes_up: sent by the client.
        flops: floating point operations on the client's device, of convolutions and products of matrices.
        seconds: of everything, server included, on one core of this machine.
        samples: training samples that the client has.
    """

    exchanges: int
    bytes_down: int
    bytes_up: int
    flops: int
    seconds: float
    samples: int


def cost_of_median_client(method: Method[Any], federation: Federation, seed: int = 0) -> NewClientCost:
    """Personalise for the unseen client with the median number of training samples, and count.

    No trained weights are needed: what is sent and computed does not depend on their values.

    Args:
        method: with its hyper-parameters.
        federation: has the client.
        seed: of everything random.
    """
    if not federation.num_unseen:
        raise PefllError(
            "there are no unseen clients, so there is nobody whose cost could be counted", code="PEFLL-T101"
        )
    samples = federation.count[TRAIN].numpy(force=True)
    by_size = federation.num_seen + np.argsort(samples[federation.num_seen :], kind="stable")
    client = int(by_size[len(by_size) // 2])
    engine = SerialEngine(federation, method, seed, 1)
    try:
        server = engine.start()
    finally:
        engine.close()
    cost = evaluation.cost_of_new_client(federation, method, server, client, seed)
    if not method.trains_in_rounds:  # there is no server
        cost = cost._replace(exchanges=0, bytes_down=0, bytes_up=0)
    return NewClientCost(*cost, int(samples[client]))
