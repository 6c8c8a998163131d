"""The connected clients: which Flower node belongs to which client, and how many samples each client says it has."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from pefll.core.errors import PefllError
from pefll.core.wording import counted
from pefll.data.federation import Federation
from pefll.data.samples import SPLITS, TRAIN
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.engines.flower.protocol.message import printable
from pefll.engines.flower.server.hellos import Hellos
from pefll.engines.flower.server.terms import Report, Terms
from pefll.engines.flower.server.weights import WeightLimits


class Roster:
    """The clients of a federation, and their nodes; see `FlowerEngine` for the arguments.

    Attributes:
        names: names of all clients; a client's number is its index here.
        nodes: the node of each connected client, by the client's number.
        unknown_nodes: nodes that are no client of this federation, with their names.
        federation: has how many samples each client has, but no samples.
    """

    def __init__(
        self,
        grid: Any,
        agreement: Agreement,
        names: Sequence[str],
        newcomers: Sequence[str],
        terms: Terms,
        report: Report,
    ) -> None:
        if len(names) != agreement.num_clients or len({*names, *newcomers}) != len(names) + len(newcomers):
            raise PefllError(
                f"the federation agreed on {counted(agreement.num_clients, 'client')} with different names, "
                f"but {counted(len(set(names)), 'different name')} came",
                code="PEFLL-F453",
            )
        self._grid, self._agreement, self._terms, self._report = grid, agreement, terms, report
        self._hellos = Hellos(grid, agreement.sha256, terms, report)
        self.names = [*names, *newcomers]
        self.nodes: dict[int, int] = {}
        self.unknown_nodes: dict[int, str] = {}
        self._declared: dict[int, list[int]] = {}  # number of samples in each split, for clients that tell it
        self.limits = WeightLimits(terms, lambda client: self.names[client], report)
        self._counts = torch.zeros(3, len(self.names), dtype=torch.int64)
        self._counts[0] = 1  # a client that does not tell counts as one training sample
        self.federation = self._federation(len(names))

    def present(self) -> list[int]:
        """Return the clients that are connected now. New nodes are asked who they are (see `Hellos`)."""
        keys = {node.node_id: node.name for node in self._grid.get_nodes()}
        online = set(keys)
        self.nodes = {client: node for client, node in self.nodes.items() if node in online}
        met = {*self.nodes.values(), *self.unknown_nodes}
        unmet = [node for node in sorted(online) if node not in met]
        replies = self._hellos.ask(unmet, keys)
        claims = Counter(keys[node] for node, answer in replies.items() if answer.get("name") == keys[node])
        for node, answer in replies.items():
            if keys[node] and answer.get("name") == keys[node] and claims[keys[node]] > 1:
                self.unknown_nodes[node] = keys[node]
                continue
            self._identify(node, answer, keys[node])
        for name in (name for name, count in claims.items() if name and count > 1):
            self._report(
                f"{claims[name]} nodes have keys with the name {printable(name, 80)}, and the server cannot tell which "
                "is the client: all of them are left out; keep one such key in keys/ and start the server again"
            )
        if replies:
            self._count()
        return sorted(self.nodes)

    def declared(self, client: int, split: int | None) -> int | None:
        """Return how many samples of a split a client says it has; None if it does not say."""
        counts = self._declared.get(client)
        return counts[split] if counts is not None and split is not None else None

    def absent(self, clients: Sequence[int]) -> dict[int, str]:
        """Return those of `clients` that are not connected, each with the reason "is not connected"."""
        there = set(self.present())
        return {client: "is not connected" for client in clients if client not in there}

    def wait_for(self, clients: int, seconds: float) -> list[int]:
        """Wait until this many clients are connected, and return them; PefllError after `seconds`."""
        ends = time.monotonic() + seconds
        there = self.present()
        while len(there) < clients:
            if time.monotonic() > ends:
                raise PefllError(
                    f"{len(there)} of {counted(clients, 'client')} came within {seconds:.0f} s; start the others, "
                    "or set wait-clients to start with fewer",
                    code="PEFLL-F454",
                )
            time.sleep(min(1.0, self._terms.pause_seconds))
            there = self.present()
        return there

    def _identify(self, node: int, answer: dict[str, Any], key: str) -> None:
        """Note which client a node is. `key` is the name of its registered key; "" for no key, as in a simulation."""
        name, counts = str(answer.get("name", "")), answer.get("counts")
        shown, why = printable(name, 80), ""
        if key and name != key:  # only the client for which a key is registered may use the key
            why = f"a node with the key of {printable(key, 80)} calls itself {shown!r}"
        elif name not in self.names:
            why = f"a node calls itself {shown!r}, which is no client of this federation"
        elif self.names.index(name) in self.nodes:
            why = f"a second node calls itself {name}"
        if why:
            self.unknown_nodes[node] = shown
            self._report(f"{why}; it is left out")
            return
        client = self.names.index(name)
        self.nodes[client] = node
        self._declared.pop(client, None)  # forget the numbers of an earlier answer
        self._counts[:, client] = torch.tensor([1, 0, 0])
        if counts is not None:
            self._declared[client] = counts

    def _count(self) -> None:
        """Note the limited number of samples of each client that tells it. The size of an evaluation depends on it."""
        for split, name in enumerate(SPLITS):
            declared = {client: float(counts[split]) for client, counts in self._declared.items()}
            limited = self.limits.limited(declared, self._terms.weight_limit, f"as {name} samples")
            for client, samples in limited.items():
                self._counts[split, client] = max(int(samples), split == TRAIN)

    def _federation(self, num_seen: int) -> Federation:
        agreed = self._agreement
        nothing = torch.empty(0, dtype=torch.int64)
        return Federation(
            x=torch.empty((0, *agreed.input_shape), dtype=torch.uint8 if agreed.normalise else torch.float32),
            y=torch.from_numpy(agreed.blank_labels(0)),
            rows=nothing,
            offset=torch.zeros_like(self._counts),
            count=self._counts,
            num_seen=num_seen,
            classes=agreed.classes,
            normalise=agreed.normalise,
            tokens=agreed.tokens,
            name=agreed.dataset,
            partition="their own",
            class_names=agreed.class_names,
            feature_names=agreed.feature_names,
            table=agreed.plan,
            names=tuple(self.names),
        )
