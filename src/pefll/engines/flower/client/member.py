"""A client on its own machine: its name, data, policy and folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pefll.core.errors import PefllError
from pefll.data.client_files import read_member
from pefll.data.federation import Federation
from pefll.data.owners import CLIENT, SPLIT
from pefll.data.user_files import state_of
from pefll.engines.flower.client.client_store import ClientStore
from pefll.engines.flower.client.policy import Policy, Refusal, WatchedClient
from pefll.engines.flower.protocol.agreement import Agreement, TooLarge
from pefll.engines.flower.protocol.names import client_name
from pefll.methods.contract import Method
from pefll.tasks.own import ask


@dataclass(frozen=True)
class Member:
    """Settings of a client on its own machine.

    Attributes:
        name: the client's name in the federation.
        data: file or folder of the client's samples.
        label: name of the labels: a table's column, or an array of an .npz file.
        state: folder for the tensors that the client keeps; None for none.
        tells_counts: whether the client's hello says how many samples it has. Scores and some updates say so anyway.
        model: file for the personal model that the server sends; None for none.
        policy: what the client's owner allows.
        agreement: the agreement between server and clients.
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
        """Read the settings from Flower's `Context`, which has the node's config and the run's config."""
        run = context.run_config
        settings = _node_settings(tuple(context.node_config.items()), str(run.get("simulation-data", "")))
        return cls(**settings, agreement=Agreement.from_config(run))

    def federation(self) -> Federation:
        """Return this client's samples, checked against the agreement. A changed file is read again."""
        key = (str(self.data), str(state_of(self.data)), self.label, self.agreement.sha256)
        return _READ.get(key, self._read)

    def _read(self) -> Federation:
        agreed = self.agreement
        for name in agreed.plan.names if agreed.plan else agreed.feature_names:  # the server chooses these names
            if name in (self.label, *(each.strip() for each in self.label.split(",")), SPLIT, CLIENT):
                raise Refusal(
                    f"refuses to read its column {name!r} as a feature: labels, splits and clients are not features; "
                    "leave it out of the federation's features",
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
            plan=agreed.plan,
            labels=agreed.labels,
        )
        if not agreed.classes:
            ask(agreed.build().problem.task, "check", own)
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
        """Return the method of the agreement; Refusal if it is too large for this machine."""
        try:
            return self.agreement.build()
        except TooLarge as error:
            raise Refusal(
                "refuses to build networks that do not fit into its memory", code="PEFLL-P010", detail=str(error)
            ) from None

    def client(self, number: int, round_: int, lr_factor: float | None = None) -> WatchedClient:
        """Return the `Client` of a round that a method's functions take as their first argument."""
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
            lr_factor=lr_factor,
        )

    def store(self) -> ClientStore:
        """Return this client's store for the current agreement."""
        if self.state is None:
            raise PefllError(
                "this method's clients keep tensors: give the node a folder with --node-config state=...",
                code="PEFLL-F445",
            )
        return ClientStore(self.state / self.agreement.sha256[:12])


def node_name(context: Any) -> str:
    """Return a node's name from the node's config; "" if it cannot be read."""
    try:
        return str(_node_settings(tuple(context.node_config.items()), "")["name"])
    except Exception:  # noqa: BLE001 - a refusal must be sent even without a name
        return ""


@lru_cache(maxsize=1024)
def _node_settings(config: tuple[tuple[str, Any], ...], simulation_data: str) -> dict[str, Any]:
    """Return the fields of `Member` from a node's config. Cached, because the config comes with every message."""
    node = dict(config)
    name = str(node.get("name", ""))
    if not name and "partition-id" in node:  # Flower's simulation: nodes have numbers only
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
    """A least-recently-used cache of samples, up to `limit` bytes. The samples used last always stay."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0
        self._read: dict[tuple[str, ...], Federation] = {}

    def get(self, key: tuple[str, ...], read: Callable[[], Federation]) -> Federation:
        """Return the samples of a key; call `read` if the cache does not have them."""
        found = self._read.pop(key, None)
        if found is None:
            found = read()
            self._held += _bytes_of(found)
        self._read[key] = found  # at the end, because it is the last used
        while self._held > self._limit and len(self._read) > 1:
            self._held -= _bytes_of(self._read.pop(next(iter(self._read))))
        return found


def _bytes_of(own: Federation) -> int:
    return own.x.nbytes + own.y.nbytes + own.rows.nbytes


_READ = DataCache(1 << 28)
