"""Who is there: which of Flower's nodes is which client, and how many samples each has, where it tells."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from pefll.core.errors import PefllError
from pefll.core.wording import counted
from pefll.data.federation import SPLITS, TRAIN, Federation
from pefll.engines.flower.protocol.agreement import Agreement
from pefll.engines.flower.protocol.message import pack, printable, sender_of
from pefll.engines.flower.protocol.names import ECHO, HELLO
from pefll.engines.flower.server.exchange import OutgoingRequest, exchange
from pefll.engines.flower.server.reply import hello_of
from pefll.engines.flower.server.terms import Report, Terms
from pefll.engines.flower.server.weights import WeightLimits


class Roster:
    """The clients of a federation and the nodes at which they are reached.

    Args:
        grid: Flower's way to the nodes.
        agreement: what both sides have the same of.
        names: of the clients that take part in training; a client's number is its place here.
        newcomers: names of clients that never take part in training; their numbers come after the others.
        terms: how long nodes are waited for.
        report: is told, in sentences, who is left alone and why.

    Attributes:
        names: of all clients, by their numbers.
        federation: the clients' counts and not one of their samples.
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
                f"the federation agreed on {counted(agreement.num_clients, 'client')}, each with a name of its own, "
                f"but {counted(len(set(names)), 'name')} came",
                code="PEFLL-F453",
            )
        self._grid, self._agreement, self._terms, self._report = grid, agreement, terms, report
        self.names = [*names, *newcomers]
        self.nodes: dict[int, int] = {}  # the node of each client that is there, by the client's number
        self.unknown_nodes: dict[int, str] = {}  # nodes that are no client of this federation, and their names
        self._declared: dict[int, list[int]] = {}  # the counts of samples that clients tell, by split
        self.limits = WeightLimits(terms, lambda client: self.names[client], report)
        self._counts = torch.zeros(3, len(self.names), dtype=torch.int64)
        self._counts[0] = 1  # nobody has nothing; how much they have, those tell who want to
        self.federation = self._federation(len(names))

    def present(self) -> list[int]:
        """Return the clients that are connected now; those that were not met before are asked who they are."""
        keys = {node.node_id: node.name for node in self._grid.get_nodes()}
        online = set(keys)
        self.nodes = {client: node for client, node in self.nodes.items() if node in online}
        met = {*self.nodes.values(), *self.unknown_nodes}
        unmet = [node for node in sorted(online) if node not in met]
        header = dict.fromkeys(ECHO, 0) | {"task": HELLO, "visit": "", "agreement": self._agreement.sha256}
        requests = {node: OutgoingRequest(node, f"query.{HELLO}", pack(header, {})) for node in unmet}
        senders: dict[int, str] = {}

        def accept(node: int, content: Any) -> dict[str, Any]:
            senders[node] = sender_of(content)  # also where nothing else can be read
            return hello_of(content)

        outcome = exchange(self._grid, requests, self._terms.exchange_seconds, HELLO, accept)
        claims = Counter(keys[node] for node, answer in outcome.replies.items() if answer.get("name") == keys[node])
        for node, answer in outcome.replies.items():
            if keys[node] and answer.get("name") == keys[node] and claims[keys[node]] > 1:
                self.unknown_nodes[node] = keys[node]
                continue
            self._meet(node, answer, keys[node])
        for name in (name for name, count in claims.items() if name and count > 1):
            self._report(
                f"{claims[name]} nodes have keys with the name {printable(name, 80)}, and nobody knows which is the "
                "client: all of them are left alone; keep one such key in keys/ and start the server again"
            )
        if outcome.replies:
            self._count()
        for node, reason in outcome.faults.items():
            who = f"client {senders[node]}" if senders.get(node) else f"node {node}, asked who it is,"
            self._report(f"{who} {reason}")
        return sorted(self.nodes)

    def declared(self, client: int, split: int | None) -> int | None:
        """Return how many samples of a split a client has said to have; None where it does not tell."""
        counts = self._declared.get(client)
        return counts[split] if counts is not None and split is not None else None

    def absent(self, clients: Sequence[int]) -> dict[int, str]:
        """Return those of some clients that are not connected."""
        there = set(self.present())
        return {client: "is not connected" for client in clients if client not in there}

    def wait_for(self, clients: int, seconds: float) -> list[int]:
        """Wait until so many clients are connected, and return them; PefllError where they do not come in time."""
        ends = time.monotonic() + seconds
        there = self.present()
        while len(there) < clients:
            if time.monotonic() > ends:
                raise PefllError(
                    f"{len(there)} of {counted(clients, 'client')} came within {seconds:.0f} s; start the others",
                    code="PEFLL-F454",
                )
            time.sleep(min(1.0, self._terms.pause_seconds))
            there = self.present()
        return there

    def _meet(self, node: int, answer: dict[str, Any], key: str) -> None:
        """Note who a node is.

        Args:
            node: as Flower numbers it.
            answer: what it says of itself.
            key: under which name the server was told its key; empty where it has none, as in a simulation.
        """
        name, counts = str(answer.get("name", "")), answer.get("counts")
        if key and name != key:  # who has a key to be let in is not yet whoever it says
            self.unknown_nodes[node] = printable(name, 80)
            self._report(
                f"a node with the key of {printable(key, 80)} calls itself {printable(name, 80)!r}; it is left alone"
            )
            return
        if name not in self.names:
            self.unknown_nodes[node] = printable(name, 80)
            self._report(
                f"a node calls itself {printable(name, 80)!r}, which is no client of this federation; it is left alone"
            )
            return
        client = self.names.index(name)
        if client in self.nodes:
            self.unknown_nodes[node] = name
            self._report(f"a second node calls itself {name}; it is left alone")
            return
        self.nodes[client] = node
        self._declared.pop(client, None)  # what it said when it was met before
        self._counts[:, client] = torch.tensor([1, 0, 0])
        if counts is not None:
            self._declared[client] = counts

    def _count(self) -> None:
        """Note for how many samples those count who tell: how many clients are evaluated depends on it."""
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
            y=nothing,
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
            names=tuple(self.names),
        )
