"""A small federation twice: all of it in one place, and each client's part in a file of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from flwr.app import Message

from pefll.core.tree import leaves
from pefll.data.federation import Federation
from pefll.engines.flower.client.app import PefllClientApp
from pefll.engines.flower.client.client_store import ClientStore
from pefll.engines.flower.inprocess import InProcessGrid, write_client
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.engines.flower.protocol.message import header_of, pack, tensors_of
from pefll.engines.flower.protocol.names import client_name
from pefll.engines.flower.server.engine import FlowerEngine
from pefll.engines.flower.server.kept_reference import reference_in
from pefll.engines.flower.server.terms import Terms
from pefll.engines.serial import SerialEngine
from tests.engines.test_engines import SETTINGS
from tests.federations import ragged

CLIENTS, PER_ROUND, ROUNDS, SEED = 6, 4, 3, 3
NO_LIMITS = {"min-samples": "0", "numbers-per-sample": "0"}  # clients with two samples take part
QUICK = Terms(exchange_seconds=0.3, round_seconds=60, pause_seconds=0.01, patience_seconds=30)


@dataclass
class Setting:
    """A federation, and the same clients behind a grid."""

    federation: Federation
    agreement: Agreement
    grid: InProcessGrid
    folder: Path

    def engine(self, **changes: Any) -> FlowerEngine:
        names = [client_name(number) for number in range(self.agreement.num_clients)]
        return FlowerEngine(
            self.grid, self.agreement, names, **{"clients_per_round": PER_ROUND, "terms": QUICK} | changes
        )

    def kept(self, client: int, row: torch.Tensor) -> torch.Tensor:
        """Return what stands behind a row of the server's state: itself, or what the client kept."""
        reference = reference_in(row)
        if reference is None:
            return row
        folder = self.folder / "state" / client_name(client) / self.agreement.sha256[:12]
        return ClientStore(folder).get(reference.store_name(""))[reference.leaf]


def setting(
    folder: Path,
    method: str = "pefll",
    shape: tuple[int, ...] = (6,),
    model: str = "mlp",
    seen: int | None = None,
    changes: dict[str, Any] | None = None,
    clients: int = CLIENTS,
    sizes: tuple[int, ...] = (2, 5, 9, 14),
) -> Setting:
    images = len(shape) == 3
    seen = clients if seen is None else seen
    federation = ragged(clients=clients, shape=shape, sizes=sizes, seen=seen, pixels=images)
    agreement = Agreement(
        method=method,
        model=model,
        input_shape=shape,
        classes=federation.classes,
        num_clients=seen,
        settings=SETTINGS[method] | (changes or {}),
        seed=SEED,
        normalise=federation.normalise,
    )
    nodes = {}
    for client in range(clients):
        name = client_name(client)
        write_client(federation, client, folder / f"{name}.npz")
        nodes[1000 + client] = {
            "name": name,
            "data": str(folder / f"{name}.npz"),
            "state": str(folder / "state" / name),
            "model": str(folder / f"{name}.safetensors"),
            **NO_LIMITS,
            "methods": method,
        }
    return Setting(federation, agreement, InProcessGrid(PefllClientApp(), nodes, agreement.to_config()), folder)


class WithoutSome(SerialEngine):
    """The serial engine, with some clients absent from some rounds."""

    absent: dict[int, set[int]]

    def _sample(self, t: int):
        drawn = super()._sample(t)
        return np.array([client for client in drawn if client not in self.absent.get(t, ())])


def serial_state(here: Setting, absent: dict[int, set[int]] | None = None, rounds: int = ROUNDS):
    """Return the state after some rounds of the serial engine."""
    engine = WithoutSome(here.federation, here.agreement.build(), SEED, PER_ROUND)
    engine.absent = absent or {}
    try:
        return engine.advance(engine.start(), 0, rounds)
    finally:
        engine.close()


def flower_state(here: Setting, rounds: int = ROUNDS, **changes: Any):
    """Return the state after some rounds with real messages, and the engine."""
    engine = here.engine(**changes)
    try:
        return engine.advance(engine.start(), 0, rounds), engine
    finally:
        engine.close()


def sha256(state: Any) -> str:
    digest = hashlib.sha256()
    for leaf in leaves(state):
        digest.update(repr((leaf.dtype, tuple(leaf.shape))).encode() + leaf.contiguous().numpy().tobytes())
    return digest.hexdigest()


def is_as_without(state: Any, here: Setting, absent: dict[int, set[int]] | None = None) -> bool:
    """Return whether a state has the bits of the serial engine's without some clients in some rounds."""
    return sha256(state) == sha256(serial_state(here, absent))


def sampled(here: Setting, t: int) -> list[int]:
    """Return the clients that are drawn for a round."""
    engine = SerialEngine(here.federation, here.agreement.build(), SEED, PER_ROUND)
    try:
        return engine._sample(t).tolist()
    finally:
        engine.close()


def trouble(here: Setting, client: int, round_: int, exchange: int, act: Callable[..., list[Any]]) -> list[int]:
    """Let something happen to a request of training; return a list that grows with each time it does.

    Args:
        here: whose grid.
        client: whose request.
        round_: of which round.
        exchange: of which exchange of the round.
        act: gets the request and `deliver`, and returns the replies.
    """
    times: list[int] = []

    def transport(node: int, request: Any, deliver: Callable[[Any], Any]) -> list[Any]:
        header = header_of(request.content)
        mine = (header["client"], header["round"], header["exchange"]) == (client, round_, exchange)
        if not mine or not request.metadata.message_type.startswith("train."):
            return [deliver(request)]
        times.append(node)
        return act(request, deliver)

    here.grid.transport = transport
    return times


def changed(request: Message, deliver: Callable[[Message], Message], change: Callable[..., Any]) -> list[Message]:
    """Return a client's reply with other tensors or another header."""
    reply = deliver(request)
    header, tensors = change(header_of(reply.content), tensors_of(reply.content))
    return [Message(pack(header, tensors), reply_to=request)]
