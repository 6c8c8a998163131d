"""The request of one exchange, and a cache of requests and replies for one round."""

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
    """Hashes of sent tensors, and replies, of one round or evaluation. Repeated attempts share this cache.

    Attributes:
        name: identifies the round or evaluation. Clients cache shared tensors until the name changes.
        sent: hashes of the tensors that each client has received.
        replies: the replies by exchange and client, each with the key of its request.
        ends: the deadline of the current attempt, on the monotonic clock.
    """

    name: str
    sent: dict[int, set[str]] = field(default_factory=dict)
    replies: dict[tuple[int, int], list[tuple[RequestKey, Reply]]] = field(default_factory=dict)
    ends: float = math.inf

    def reply_to(self, exchange: int, client: int, asked: RequestKey) -> Reply | None:
        """Return the reply to the same request in an earlier attempt, or None."""
        for before, reply in self.replies.get((exchange, client), ()):
            if before.same_as(asked):
                return reply
        return None

    def note_reply(self, exchange: int, client: int, asked: RequestKey, reply: Reply) -> None:
        """Store a reply for later attempts."""
        self.replies.setdefault((exchange, client), []).append((asked, reply))


class RequestKey(NamedTuple):
    """Everything that a client's reply depends on, besides the client and the round.

    Attributes:
        texts: names, small numbers, and hashes of the shared tensors.
        tensors: tensors for this client only. They are not hashed, because only a repeated round compares them.
    """

    texts: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    def same_as(self, other: RequestKey) -> bool:
        """Whether two requests are equal bit for bit."""
        return (
            self.texts == other.texts
            and len(self.tensors) == len(other.tensors)
            and all(_same_bits(mine, its) for mine, its in zip(self.tensors, other.tensors, strict=True))
        )


@dataclass
class Request:
    """The request of one exchange to all clients of a cohort.

    Attributes:
        task: the name of the method's function.
        arguments: the task's arguments.
        static: whole-number arguments of the task, such as the split.
        clients: the cohort's clients, in the order of the arguments' rows.
        failed: clients that get no more requests.
        round: number of the training round; 0 in an evaluation.
        trains: whether this is training.
        exchange: number of the exchange in the round or evaluation.
        cache: the cache of the round or evaluation.
        agreement: SHA-256 of the agreement.
        lr_factor: factor of the clients' learning rates in this round; None for 1.
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
    lr_factor: float | None = None

    @property
    def reference(self) -> KeptReference:
        """The reference to the first tensor that clients keep in this exchange."""
        return KeptReference(self.round if self.trains else -1, self.exchange)

    @property
    def scores(self) -> bool:
        """Whether the reply has the sums of the learned task: see `Method.predict`."""
        return self.task == "predict"

    @property
    def kind(self) -> str:
        """The Flower message type."""
        category = "train" if self.trains else "evaluate" if self.scores else "query"
        return f"{category}.{self.task}"

    @property
    def name(self) -> str:
        """The name of the exchange in Flower's logs."""
        return f"{self.round}.{self.exchange}"

    def header(self, client: int) -> dict[str, Any]:
        """Return the header fields that a request and its reply have in common."""
        return {
            "task": self.task,
            "round": self.round,
            "exchange": self.exchange,
            "cache": self.cache.name,
            "client": client,
            "agreement": self.agreement,
        }

    def message_for(self, client: int, knows: set[str]) -> tuple[dict[str, Any], dict[str, Tensor], RequestKey]:
        """Return the header and tensors of one client's message, and the key of the request.

        Args:
            client: the recipient.
            knows: hashes of tensors that the client has cached.
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
        if self.lr_factor is not None:
            header["lr_factor"] = self.lr_factor
        return header, tensors, RequestKey(tuple(depends), tuple(alone))

    @cached_property
    def _digests(self) -> dict[int, str]:
        """Hashes of the shared tensors, by `id(tensor)`."""
        return {
            id(leaf): digest(leaf)
            for argument in self.arguments
            if isinstance(argument, Everyone)
            for leaf in leaves(argument.value)
        }


def digest(leaf: Tensor) -> str:
    """Return a hash of a tensor's type, shape and values."""
    plain = leaf.detach().cpu().contiguous()
    content = hashlib.sha256(repr((plain.dtype, tuple(plain.shape))).encode())
    content.update(plain.numpy().tobytes())
    return content.hexdigest()[:32]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits; -0 differs from 0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
