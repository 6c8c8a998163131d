"""One client on its own machine: its name, its data, and where it keeps what is its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pefll.core.errors import PefllError
from pefll.data.federation import Federation
from pefll.data.user_files import CLIENT, SPLIT, read_member, state_of
from pefll.engines.flower.client.client_store import ClientStore
from pefll.engines.flower.client.policy import Policy, Refusal, WatchedClient
from pefll.engines.flower.protocol.agreement import Agreement, TooLarge
from pefll.engines.flower.protocol.names import client_name
from pefll.methods.contract import Method


@dataclass(frozen=True)
class Member:
    """A client as its own machine knows it.

    Attributes:
        name: what it is called in the federation.
        data: where its samples are.
        label: a table's column of labels, or an .npz's array of them.
        state: its folder for what it keeps; None for none.
        tells_counts: whether its hello says how many samples it has; scores and some updates do anyway.
        model: where its personal model is written when the server sends one; None for nowhere.
        policy: what its owner allows.
        agreement: what it was set up for.
    """

    name: str
    data: Path
    label: str
    state: Path | None
    tells_counts: bool
    model: Path | None
    policy: Policy
    agreement: Agreement

    @classmethod
    def from_context(cls, context: Any) -> Member:
        """Read it from the `Context` that Flower hands to a ClientApp: the node's own config and the run's."""
        run = context.run_config
        facts = _node_settings(tuple(context.node_config.items()), str(run.get("simulation-data", "")))
        return cls(**facts, agreement=Agreement.from_config(run))

    def federation(self) -> Federation:
        """Return this client's own samples, checked to be like everybody's.

        They are read again when their file or folder has changed, and in a process that has not read them yet.
        """
        key = (str(self.data), str(state_of(self.data)), self.label, self.agreement.sha256)
        return _READ.get(key, self._read)

    def _read(self) -> Federation:
        agreed = self.agreement
        for name in agreed.feature_names:  # they are the server's choice
            if name in (self.label, SPLIT, CLIENT):
                raise Refusal(
                    f"refuses to read its column {name!r} as a feature: labels, splits and clients are none; leave it "
                    "out of the federation's features",
                    code="PEFLL-P014",
                )
        own = read_member(
            self.data,
            classes=agreed.classes,
            label=self.label,
            features=agreed.feature_names,
            class_names=agreed.class_names,
            normalise=agreed.normalise,
            tokens=agreed.tokens,
            seed=agreed.seed,
        )
        if own.input_shape != agreed.input_shape:
            raise PefllError(
                f"{self.data}: samples have shape {own.input_shape}, but the federation agreed on {agreed.input_shape}",
                code="PEFLL-F442",
            )
        if own.holds_images and own.normalise is None:
            raise PefllError(
                f"{self.data} holds uint8 pixels, but the federation agreed on no channel statistics", code="PEFLL-F443"
            )
        if agreed.normalise is not None and own.normalise is None:
            raise PefllError(
                f"{self.data}: the federation agreed on uint8 pixels 0..255; convert the samples", code="PEFLL-F444"
            )
        return own

    def method(self) -> Method[Any]:
        """Return the method of the agreement; Refusal where it is too large for this machine."""
        try:
            return self.agreement.build()
        except TooLarge as error:
            raise Refusal(
                "refuses to build networks that do not fit into its memory", code="PEFLL-P010", detail=str(error)
            ) from None

    def client(self, number: int, round_: int) -> WatchedClient:
        """Return what a method's functions see of this client in a round."""
        own = self.federation()
        train, validation, test = own.count[:, 0].tolist()
        return WatchedClient(
            federation=own,
            seed=self.agreement.seed,
            id=torch.tensor(number),
            round=torch.tensor(round_),
            offset=own.offset[:, 0],
            count=own.count[:, 0],
            capacity=(train, validation, test),
            dtype=self.agreement.dtype,
        )

    def store(self) -> ClientStore:
        """Return what this client keeps, for the present agreement."""
        if self.state is None:
            raise PefllError(
                "this method's clients keep something: give the node a folder, --node-config state=...",
                code="PEFLL-F445",
            )
        return ClientStore(self.state / self.agreement.sha256[:12])


def node_name(context: Any) -> str:
    """Return what a node is called, from its own config alone; "" where even that cannot be read."""
    try:
        return str(_node_settings(tuple(context.node_config.items()), "")["name"])
    except Exception:  # noqa: BLE001 - asked for while a refusal is written, which must come to be
        return ""


@lru_cache(maxsize=1024)
def _node_settings(config: tuple[tuple[str, Any], ...], simulation_data: str) -> dict[str, Any]:
    """Return what a node's own config says; it comes with every message."""
    node = dict(config)
    name = str(node.get("name", ""))
    if not name and "partition-id" in node:  # Flower's simulation: it numbers nodes and tells them nothing else
        name = client_name(int(node["partition-id"]))
    folder = Path(simulation_data or ".")
    state, model = str(node.get("state", "")), str(node.get("model", ""))
    return {
        "name": name,
        "data": Path(str(node["data"])) if "data" in node else folder / f"{name}.npz",
        "label": str(node.get("label", "label")),
        "state": Path(state) if state else folder / "state" / name if "partition-id" in node else None,
        "tells_counts": bool(node.get("tells-counts", True)),
        "model": Path(model) if model else None,
        "policy": Policy.of_node(node),
    }


class DataCache:
    """Samples that were read in this process, by where they are from and their state then.

    Those used last stay, and those before them as long as all together have no more than some bytes. Nothing depends
    on what is here but time: a ClientApp's process may end after any message.

    Args:
        limit: in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._read: dict[tuple[str, ...], Federation] = {}

    def get(self, key: tuple[str, ...], read: Callable[[], Federation]) -> Federation:
        """Return what is here under a key, or read it."""
        found = self._read.pop(key, None)
        if found is None:
            found = read()
            self._held += _bytes_of(found)
        self._read[key] = found  # now the last
        while self._held > self._limit and len(self._read) > 1:
            self._held -= _bytes_of(self._read.pop(next(iter(self._read))))
        return found


def _bytes_of(own: Federation) -> int:
    return own.x.nbytes + own.y.nbytes + own.rows.nbytes


_READ = DataCache(1 << 28)
