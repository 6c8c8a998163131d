"""What is asked of the clients of a cohort in one exchange, and what is remembered of it until a round is over."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from pefll.core.tree import leaves
from pefll.engines.flower.protocol.names import KEPT, KNOWN, SENT, SHARED
from pefll.engines.flower.server.kept_reference import KeptReference, reference_in
from pefll.engines.flower.server.reply import Reply
from pefll.engines.wire import structure_of
from pefll.methods.contract import Each, Everyone


@dataclass
class RoundCache:
    """What is known about the requests of one round or evaluation, across attempts.

    Attributes:
        name: tells visits apart; clients remember what they were sent until its name changes.
        sent: which tensors each client was sent in it, by their hashes.
        replies: to requests, by exchange and client, each with what was asked.
        ends: when the attempt under way is given up.
    """

    name: str
    sent: dict[int, set[str]] = field(default_factory=dict)
    replies: dict[tuple[int, int], list[tuple[RequestKey, Reply]]] = field(default_factory=dict)
    ends: float = math.inf

    def reply_to(self, exchange: int, client: int, asked: RequestKey) -> Reply | None:
        """Return the reply of an earlier attempt to the very same request; None where there is none."""
        for before, reply in self.replies.get((exchange, client), ()):
            if before.same_as(asked):
                return reply
        return None

    def note_reply(self, exchange: int, client: int, asked: RequestKey, reply: Reply) -> None:
        """Remember a reply until the visit is over."""
        self.replies.setdefault((exchange, client), []).append((asked, reply))


class RequestKey(NamedTuple):
    """All that a client's reply depends on, beside the client and the round.

    Attributes:
        facts: names, small numbers, and hashes of what everyone gets.
        tensors: what this client alone was sent. They are compared when a round is run again, which is seldom; a hash
            of each would be made in every exchange.
    """

    facts: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    def same_as(self, other: RequestKey) -> bool:
        """Whether two requests are the same bit for bit."""
        return (
            self.facts == other.facts
            and len(self.tensors) == len(other.tensors)
            and all(_same_bits(mine, its) for mine, its in zip(self.tensors, other.tensors, strict=True))
        )


@dataclass
class Request:
    """What is asked of every client of a cohort in one exchange.

    Attributes:
        task: the name of the method's function.
        arguments: what it gets.
        static: its small whole numbers.
        clients: of the cohort, in the order of the arguments' rows.
        failed: those of them that are not asked any more.
        round: of training; 0 in an evaluation.
        trains: whether this is training.
        exchange: which one of the round or evaluation.
        cache: see `RoundCache`.
        agreement: the SHA-256 of what both sides have the same of.
    """

    task: str
    arguments: Sequence[Everyone | Each]
    static: dict[str, int]
    clients: list[int]
    failed: set[int]
    round: int
    trains: bool
    exchange: int
    cache: RoundCache
    agreement: str

    @property
    def reference(self) -> KeptReference:
        """What stands in the server's state for what clients keep of this exchange."""
        return KeptReference(self.round if self.trains else -1, self.exchange)

    @property
    def kind(self) -> str:
        """The type of the messages."""
        category = "train" if self.trains else "evaluate" if self.task == "predict" else "query"
        return f"{category}.{self.task}"

    @property
    def name(self) -> str:
        """What Flower's logs call the exchange."""
        return f"{self.round}.{self.exchange}"

    def header(self, client: int) -> dict[str, Any]:
        """Return what a message and its reply say about themselves."""
        return {
            "task": self.task,
            "round": self.round,
            "exchange": self.exchange,
            "visit": self.cache.name,
            "client": client,
            "agreement": self.agreement,
        }

    def message_for(self, client: int, knows: set[str]) -> tuple[dict[str, Any], dict[str, Tensor], RequestKey]:
        """Return the header and the tensors of one client's message, and all that the reply depends on.

        Args:
            client: whom for.
            knows: hashes of tensors that need not be sent.
        """
        row = self.clients.index(client)
        places: list[tuple[str, str]] = []
        tensors: dict[str, Tensor] = {}
        depends: list[str] = [self.task, repr(sorted(self.static.items()))]
        alone: list[Tensor] = []
        for argument in self.arguments:
            for leaf in leaves(argument.value):
                if isinstance(argument, Everyone):
                    hashed = self._digests[id(leaf)]
                    places.append((KNOWN if hashed in knows else SHARED, hashed))
                    depends.append(hashed)
                    if hashed not in knows:
                        tensors[hashed] = leaf
                    continue
                mine = leaf[row]
                reference = reference_in(mine)
                if reference is None:
                    places.append((SENT, str(len(places))))
                    tensors[places[-1][1]] = mine
                    alone.append(mine.detach())
                    depends.append(SENT)
                else:
                    places.append((KEPT, f"{reference.store_name(self.cache.name)}:{reference.leaf}"))
                    depends.append(places[-1][1])
        header = self.header(client) | {
            "static": self.static,
            "trees": [structure_of(argument.value) for argument in self.arguments],
            "places": places,
            "keep": self.reference.store_name(self.cache.name),
        }
        return header, tensors, RequestKey(tuple(depends), tuple(alone))

    @cached_property
    def _digests(self) -> dict[int, str]:
        """The hashes of what everyone gets, by the tensors' identities."""
        return {
            id(leaf): digest(leaf)
            for argument in self.arguments
            if isinstance(argument, Everyone)
            for leaf in leaves(argument.value)
        }


def digest(leaf: Tensor) -> str:
    """Return a hash of a tensor's type, shape and numbers."""
    plain = leaf.detach().cpu().contiguous()
    content = hashlib.sha256(repr((plain.dtype, tuple(plain.shape))).encode())
    content.update(plain.numpy().tobytes())
    return content.hexdigest()[:32]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, -0 and 0 told apart."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
