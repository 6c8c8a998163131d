"""One client on its own machine: its name, its data, and where it keeps what is its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pefll.data.client import Client
from pefll.data.federation import Federation
from pefll.data.own import read_member
from pefll.engines.flower.agreement import Agreement
from pefll.engines.flower.keep import Store
from pefll.errors import PefllError


@dataclass(frozen=True)
class Member:
    """A client as its own machine knows it.

    Attributes:
        name: what it is called in the federation.
        data: where its samples are.
        label: a table's column of labels.
        state: its folder for what it keeps; None for none.
        tells_counts: whether the server may know how many samples it has.
        model: where its personal model is written when the server sends one; None for nowhere.
        agreement: what it was set up for.
    """

    name: str
    data: Path
    label: str
    state: Path | None
    tells_counts: bool
    model: Path | None
    agreement: Agreement

    @classmethod
    def of(cls, context: Any) -> Member:
        """Read it from the `Context` that Flower hands to a ClientApp: the node's own config and the run's."""
        node, run = context.node_config, context.run_config
        agreement = Agreement.from_config(run)
        name = str(node.get("name", ""))
        if not name and "partition-id" in node:  # Flower's simulation: it numbers nodes and tells them nothing else
            name = client_name(int(node["partition-id"]))
        folder = Path(str(run.get("simulation-data", "")) or ".")
        state, model = str(node.get("state", "")), str(node.get("model", ""))
        return cls(
            name=name,
            data=Path(str(node["data"])) if "data" in node else folder / f"{name}.npz",
            label=str(node.get("label", "label")),
            state=Path(state) if state else folder / "state" / name if "partition-id" in node else None,
            tells_counts=bool(node.get("tells-counts", True)),
            model=Path(model) if model else None,
            agreement=agreement,
        )

    def federation(self) -> Federation:
        """Read this client's own samples and check that they are like everybody's."""
        agreed = self.agreement
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
                f"{self.data}: samples have shape {own.input_shape}, but the federation agreed on {agreed.input_shape}"
            )
        if own.holds_images and own.normalise is None:
            raise PefllError(f"{self.data} holds uint8 pixels, but the federation agreed on no channel statistics")
        if agreed.normalise is not None and own.normalise is None:
            raise PefllError(f"{self.data}: the federation agreed on uint8 pixels 0..255; convert the samples")
        return own

    def client(self, number: int, round_: int) -> Client:
        """Return what a method's functions see of this client in a round."""
        own = self.federation()
        train, validation, test = own.count[:, 0].tolist()
        return Client(
            federation=own,
            seed=self.agreement.seed,
            id=torch.tensor(number),
            round=torch.tensor(round_),
            offset=own.offset[:, 0],
            count=own.count[:, 0],
            capacity=(train, validation, test),
            dtype=self.agreement.dtype,
        )

    def store(self) -> Store:
        """Return what this client keeps, for the present agreement."""
        if self.state is None:
            raise PefllError("this method's clients keep something: give the node a folder, --node-config state=...")
        return Store(self.state / self.agreement.sha256[:12])


def client_name(number: int) -> str:
    """Return the usual name of a client, such that names sort as numbers do."""
    return f"client-{number:03d}"
