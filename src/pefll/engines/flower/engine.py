"""Rounds with real clients, any of which may fail at any time.

A method's round is written for a fixed cohort. When a client fails in one of its exchanges, the round is run again from
its start without that client, and replies to requests that are the same are not asked for again. What a client sends
is a function of (seed, round, client) and of the request, so the result is that of a round in which the client that
failed was never there. Where too few are left, nothing of the round is used, and it is repeated later.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pefll.data.client import Client
from pefll.data.federation import Federation, Samples, assemble
from pefll.engines.cohort import (
    DoorCohort,
    EngineSettings,
    Ids,
    Ledger,
    check_cohort_size,
    sample_cohort,
    seen_and_new,
)
from pefll.engines.flower.agreement import Agreement
from pefll.engines.flower.client import ECHO, HELLO, KEPT, KNOWN, SENT, SHARED, owned
from pefll.engines.flower.keep import Ticket, ticket_in
from pefll.engines.flower.message import (
    HEADER_BYTES,
    TENSORS,
    BadMessage,
    all_finite,
    bytes_of,
    header_of,
    pack,
    tensors_of,
)
from pefll.engines.flower.post import Letter, exchange
from pefll.engines.later import Clock, Later
from pefll.engines.wire import structure_of
from pefll.errors import PefllError
from pefll.methods.contract import Each, Everyone, Method, Own
from pefll.tree import Tree, leaves, map_tree

DELIVER = "deliver"
CLIENTS_AT_ONCE = 256  # evaluation asks so many at a time, so that memory does not grow with the federation
Report = Callable[[str], None]


@dataclass(frozen=True)
class Terms:
    """How long clients are waited for, and how many must stay.

    Attributes:
        exchange_seconds: for the replies of one exchange.
        round_seconds: for one attempt at a round; then it is given up and repeated.
        quorum: the share of a round's clients that must complete all its exchanges.
        pause_seconds: before a round is repeated.
        patience_seconds: how long one round may be repeated before the run stops, with what is saved.
        norm_limit: a reply whose norm is so many times that of the cohort's median is refused; 0 for no limit.
    """

    exchange_seconds: float = 120.0
    round_seconds: float = 600.0
    quorum: float = 0.5
    pause_seconds: float = 5.0
    patience_seconds: float = 3600.0
    norm_limit: float = 1000.0

    def __post_init__(self) -> None:
        if not 0 < self.quorum <= 1:
            raise PefllError(
                f"quorum is {self.quorum}; it must be a share of a round's clients, more than 0 and up to 1"
            )
        if min(self.exchange_seconds, self.round_seconds) <= 0:
            raise PefllError("exchange_seconds and round_seconds must be more than 0")


class Dropped(Exception):
    """Clients failed in an exchange of training.

    Attributes:
        faults: by client, as the end of a sentence.
    """

    def __init__(self, faults: dict[int, str]) -> None:
        super().__init__(str(faults))
        self.faults = faults


class OutOfTime(Exception):
    """An attempt at a round took too long."""


class _Missing(NamedTuple):
    """A client's reply that it does not remember tensors, named by their hashes."""

    digests: list[str]


@dataclass
class Visit:
    """What is known about the requests of one round or evaluation, across attempts.

    Attributes:
        name: tells visits apart; clients remember what they were sent until its name changes.
        told: which tensors each client was sent in it, by their hashes.
        replies: to requests, by exchange, client and the request's hash.
        ends: when the attempt under way is given up.
    """

    name: str
    told: dict[int, set[str]] = field(default_factory=dict)
    replies: dict[tuple[int, int, str], list[Tensor]] = field(default_factory=dict)
    ends: float = math.inf


@dataclass(eq=False, kw_only=True)
class FlowerCohort(DoorCohort):
    """Clients on other machines; each `run` is one exchange.

    Attributes:
        engine: reaches them.
        round: of training; 0 in an evaluation.
        trains: whether this is training: then a client that fails is told by `Dropped`. In an evaluation its numbers
            are 0, and so is its number of samples, which leaves it out of every mean.
        visit: see `Visit`.
        missing: clients that failed in this evaluation, and why.
    """

    engine: FlowerEngine
    round: int
    trains: bool
    visit: Visit
    missing: dict[int, str] = field(default_factory=dict)
    _exchange: int = 0

    @property
    def exchanges(self) -> int:
        """How many there were so far."""
        return self._exchange

    def anew(self) -> FlowerCohort:
        """Return the same clients with nothing sent or counted yet, for evaluating them again."""
        return replace(self, ledger=Ledger(), _known=[], visit=Visit(secrets.token_hex(8)), missing={}, _exchange=0)

    def _reach(self, task: Callable[..., Tree], arguments: tuple[Everyone | Each, ...], static: dict[str, int]) -> Tree:
        cast = [type(argument)(map_tree(self.engine.cast, argument.value)) for argument in arguments]
        name = getattr(task, "__name__", "")
        if getattr(self.engine.method, name, None) != task:
            raise PefllError("clients on other machines do what their method says and no other function")
        if not self.trains and not self._exchange:
            self.missing |= self.engine.absent(self.ids.tolist())
        count, self._exchange = self._exchange, self._exchange + 1
        ticket = Ticket(self.round if self.trains else -1, count)
        form = self.engine.form_of_reply(task, cast, static)
        ask = _Request(self, name, cast, static, ticket, count)
        replies, faults = self.engine.gather(ask, form)
        if faults and self.trains:
            raise Dropped(faults)
        for client, reason in faults.items():
            self.engine.report(f"evaluation: {self.engine.name_of(client)} {reason}")
        self.missing |= faults
        nothing = [torch.zeros_like(leaf) for leaf in leaves(form, but=Own)]
        rows = [replies.get(client, nothing) for client in self.ids.tolist()]
        stacked = iter([torch.stack(parts) for parts in zip(*rows, strict=True)])
        return self._assemble(form, stacked, iter(range(sum(1 for part in owned(form) for _ in leaves(part)))), ticket)

    def _assemble(self, form: Tree, sent: Iterator[Tensor], kept: Iterator[int], ticket: Ticket) -> Tree:
        """Return the replies with a leading client axis; for what clients keep there are tickets."""
        if isinstance(form, Own):
            return Own(
                map_tree(
                    lambda leaf: torch.full(
                        (self.size, *leaf.shape), ticket._replace(leaf=next(kept)).number, dtype=leaf.dtype
                    ),
                    form.value,
                )
            )
        if isinstance(form, tuple):
            return type(form)(*(self._assemble(part, sent, kept, ticket) for part in form))
        return next(sent)


class _Request:
    """What is asked of every client of a cohort in one exchange."""

    def __init__(
        self,
        cohort: FlowerCohort,
        task: str,
        arguments: Sequence[Everyone | Each],
        static: dict[str, int],
        ticket: Ticket,
        count: int,
    ) -> None:
        self.cohort, self.task, self.arguments, self.static = cohort, task, arguments, static
        self.ticket, self.count = ticket, count
        self._digests = {
            id(leaf): digest(leaf)
            for argument in arguments
            if isinstance(argument, Everyone)
            for leaf in leaves(argument.value)
        }

    @property
    def kind(self) -> str:
        """The type of the messages."""
        category = "train" if self.cohort.trains else "evaluate" if self.task == "predict" else "query"
        return f"{category}.{self.task}"

    def header(self, client: int) -> dict[str, Any]:
        """Return what a message and its reply say about themselves."""
        return {
            "task": self.task,
            "round": self.cohort.round,
            "exchange": self.count,
            "visit": self.cohort.visit.name,
            "client": client,
            "agreement": self.cohort.engine.agreement.sha256,
        }

    def letter(self, client: int, knows: set[str]) -> tuple[dict[str, Any], dict[str, Tensor], str]:
        """Return the header and the tensors of one client's message, and a hash of all that the reply depends on.

        Args:
            client: whom for.
            knows: hashes of tensors that need not be sent.
        """
        row = self.cohort.ids.tolist().index(client)
        places: list[tuple[str, str]] = []
        tensors: dict[str, Tensor] = {}
        depends: list[str] = [self.task, repr(sorted(self.static.items()))]
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
                ticket = ticket_in(mine)
                if ticket is None:
                    places.append((SENT, str(len(places))))
                    tensors[places[-1][1]] = mine
                    depends.append(digest(mine))
                else:
                    places.append((KEPT, f"{ticket.name(self.cohort.visit.name)}:{ticket.leaf}"))
                    depends.append(places[-1][1])
        header = self.header(client) | {
            "static": self.static,
            "trees": [structure_of(argument.value) for argument in self.arguments],
            "places": places,
            "keep": self.ticket.name(self.cohort.visit.name),
        }
        return header, tensors, hashlib.sha256("\n".join(depends).encode()).hexdigest()


class FlowerEngine:
    """Runs rounds with clients that Flower reaches.

    Args:
        grid: Flower's way to them.
        agreement: what both sides have the same of.
        names: of the clients that take part in training; a client's number is its place here.
        clients_per_round: c; 0 for an engine that only evaluates.
        terms: deadlines and quorum.
        report: is told, in sentences, who failed and why.
        template: a state of the right shape; where there is one, `start` returns it and asks nobody. For runs that go
            on from a checkpoint.
        newcomers: names of clients that never take part in training; their numbers come after the others.
    """

    name = "flower"

    def __init__(
        self,
        grid: Any,
        agreement: Agreement,
        names: Sequence[str],
        clients_per_round: int,
        terms: Terms | None = None,
        report: Report | None = None,
        template: Tree | None = None,
        newcomers: Sequence[str] = (),
    ) -> None:
        if len(names) != agreement.num_clients or len({*names, *newcomers}) != len(names) + len(newcomers):
            raise PefllError(
                f"the federation agreed on {agreement.num_clients} clients, each with a name of its own, but "
                f"{len(set(names))} names were given"
            )
        self.grid, self.agreement, self.terms = grid, agreement, terms or Terms()
        self.method: Method[Any] = agreement.build()
        self.seed, self.dtype, self.device = agreement.seed, agreement.dtype, torch.device("cpu")
        self.ledger = Ledger()
        self.clients_per_round = clients_per_round
        self.dropped: list[tuple[int, str, str]] = []
        self.report: Report = report or (lambda sentence: None)
        self._names, self._template = [*names, *newcomers], template
        self._nodes: dict[int, int] = {}  # the node of each client that is there, by the client's number
        self._strangers: dict[int, str] = {}  # nodes that are no client of this federation, and their names
        self._counts = torch.zeros(3, len(self._names), dtype=torch.int64)
        self._counts[0] = 1  # nobody has nothing; how much they have, those tell who want to
        self._forms: dict[object, Tree] = {}
        self.federation = self._federation(len(names))
        check_cohort_size(self.federation, clients_per_round)
        EngineSettings.take(self)

    # What every engine does.

    def start(self) -> Tree:
        """Return the server's state before the first round."""
        if self._template is not None:
            return map_tree(self.cast, self._template)
        sampled = self._sample(0).tolist()
        began = time.monotonic()
        while True:
            self.present()
            for client in sampled:
                # The first client that was drawn; where it fails, the next, as if the first had not been drawn.
                try:
                    cohort = self._cohort([client], 0, Visit("0", ends=self._deadline()))
                    return map_tree(self.cast, self.method.init(self.seed, cohort))
                except Dropped as lost:
                    self._note(0, lost.faults)
                except OutOfTime:
                    self._note(0, {client: "took too long"})
            self._wait(began, "before the first round no client of it answered")

    def launch(self, server: Tree, first: int, rounds: int) -> tuple[Tree, Later[None]]:
        """Do rounds first..first+rounds-1 and return the server's state; there is nothing left to wait for."""
        clock = Clock(self.device)
        for t in range(first, first + rounds):
            server = self._round(server, t)
        return server, clock.later(torch.empty(0), lambda _: None)

    def advance(self, server: Tree, first: int, rounds: int) -> Tree:
        """Return the server's state after rounds first..first+rounds-1."""
        return self.launch(server, first, rounds)[0]

    def snapshot(self, server: Tree) -> Tree:
        """Return the state itself: rounds make new ones and do not write to it."""
        return server

    def repeated(self, function: Callable[[Tree], Tensor]) -> Callable[[Tree], Tensor]:
        """Return `function` itself."""
        return function

    def turn(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def cohorts(self, clients: Ids) -> Iterator[tuple[Ids, FlowerCohort]]:
        """Yield (clients, cohort) that together hold all `clients`."""
        for group, is_new in seen_and_new(self.federation, clients):
            for start in range(0, len(group), CLIENTS_AT_ONCE):
                chosen = group[start : start + CLIENTS_AT_ONCE]
                visit = Visit(secrets.token_hex(8))
                yield chosen, self._cohort(chosen.tolist(), 0, visit, trains=False, is_new=is_new)

    def close(self) -> None:
        """Give torch its settings back; clients live on."""
        EngineSettings.give_back(self)

    def cast(self, value: Tensor) -> Tensor:
        """Return a value in the engine's precision."""
        return value.to("cpu", self.dtype if value.is_floating_point() else value.dtype)

    # Who is there.

    def name_of(self, client: int) -> str:
        """Return what a client is called."""
        return self._names[client]

    def present(self) -> list[int]:
        """Return the clients that are connected now; those that were not met before are asked who they are."""
        online = set(self.grid.get_node_ids())
        self._nodes = {client: node for client, node in self._nodes.items() if node in online}
        met = {*self._nodes.values(), *self._strangers}
        unmet = [node for node in sorted(online) if node not in met]
        header = dict.fromkeys(ECHO, 0) | {"task": HELLO, "visit": "", "agreement": self.agreement.sha256}
        letters = {node: Letter(node, f"query.{HELLO}", pack(header, {})) for node in unmet}
        outcome = exchange(self.grid, letters, self.terms.exchange_seconds, HELLO, lambda _, content: _told(content))
        for node, told in outcome.replies.items():
            self._meet(node, told)
        for reason in outcome.faults.values():
            self.report(f"a node that was asked who it is {reason}")
        return sorted(self._nodes)

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
                    f"{len(there)} of {clients} clients were there after {seconds:.0f} s; start the others"
                )
            time.sleep(min(1.0, self.terms.pause_seconds))
            there = self.present()
        return there

    def _meet(self, node: int, told: dict[str, Any]) -> None:
        name, counts = str(told.get("name", "")), told.get("counts")
        if name not in self._names:
            self._strangers[node] = name
            self.report(f"a node calls itself {name!r}, which is no client of this federation; it is left alone")
            return
        client = self._names.index(name)
        if client in self._nodes:
            self._strangers[node] = name
            self.report(f"a second node calls itself {name}; it is left alone")
            return
        self._nodes[client] = node
        if isinstance(counts, list) and len(counts) == 3 and all(type(c) is int and 0 <= c < 1 << 40 for c in counts):
            self._counts[:, client] = torch.tensor(counts).clamp(min=0)
            self._counts[0, client].clamp_(min=1)

    def _federation(self, num_seen: int) -> Federation:
        """Return a federation with the clients' counts and not one of their samples."""
        agreed = self.agreement
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
        )

    @property
    def nodes(self) -> list[int]:
        """The nodes of the clients that are connected, as Flower numbers them."""
        return list(self._nodes.values())

    @property
    def strangers(self) -> dict[int, str]:
        """The nodes that are no client of this federation, and what they call themselves."""
        return dict(self._strangers)

    # Rounds.

    def _round(self, server: Tree, t: int) -> Tree:
        """Do one round with those of its clients that complete all its exchanges."""
        sampled = self._sample(t).tolist()
        quorum = max(1, math.ceil(self.terms.quorum * len(sampled)))
        began = time.monotonic()
        visit = Visit(f"{t:x}")
        while True:
            visit.ends = self._deadline()
            dropped = self.absent(sampled)
            self._note(t, dropped)
            while len(sampled) - len(dropped) >= quorum:
                ids = [client for client in sampled if client not in dropped]
                try:
                    return self.method.round(server, self._cohort(ids, t, visit))
                except Dropped as lost:
                    self._note(t, lost.faults)
                    dropped |= lost.faults
                except OutOfTime:
                    self.report(f"round {t}: its {self.terms.round_seconds:.3g} s are over")
                    break
            left = len(sampled) - len(dropped)
            self._wait(began, f"round {t}: {left} of {len(sampled)} clients are left, and {quorum} are needed")

    def _wait(self, began: float, sentence: str) -> None:
        """Say that a round is repeated and pause; PefllError where that was done for too long."""
        if time.monotonic() - began > self.terms.patience_seconds:
            raise PefllError(
                f"{sentence}; that went on for {self.terms.patience_seconds:.3g} s: start the run again later"
            )
        self.report(f"{sentence}; it is repeated")
        time.sleep(self.terms.pause_seconds)

    def _note(self, t: int, faults: dict[int, str]) -> None:
        """Write down who was left out of a round and why."""
        for client, reason in faults.items():
            self.dropped.append((t, self._names[client], reason))
            self.report(f"round {t}: {self._names[client]} is left out: it {reason}")

    def _deadline(self) -> float:
        return time.monotonic() + self.terms.round_seconds

    def _sample(self, t: int) -> Ids:
        return sample_cohort(self.federation, self.seed, torch.tensor(t), self.clients_per_round).numpy()

    def _cohort(self, ids: list[int], t: int, visit: Visit, trains: bool = True, is_new: bool = False) -> FlowerCohort:
        return FlowerCohort(
            size=len(ids),
            ids=torch.tensor(ids, dtype=torch.int64),
            is_new=is_new,
            ledger=Ledger(),  # of what one attempt would cost; the engine's own counts what was really sent
            engine=self,
            round=t,
            trains=trains,
            visit=visit,
        )

    # Exchanges.

    def deliver(self, cohort: FlowerCohort, theta: Tensor) -> dict[int, str]:
        """Send every client of a cohort its personal model, to be written to its own disk.

        Args:
            cohort: whose models.
            theta: [c, D], as `personalize` returned it for this cohort.

        Returns:
            The clients that have none now, and why.
        """
        ask = _Request(cohort, DELIVER, [Each(self.cast(theta))], {}, Ticket(-1, cohort.exchanges), cohort.exchanges)
        _, faults = self.gather(ask, ())
        return cohort.missing | faults

    def gather(self, ask: _Request, form: Tree) -> tuple[dict[int, list[Tensor]], dict[int, str]]:
        """Ask every client of a cohort that has not failed yet.

        Returns:
            The tensors of each reply that is as it should be, and what is wrong with the others.
        """
        cohort, visit = ask.cohort, ask.cohort.visit
        wanted = [client for client in cohort.ids.tolist() if client not in cohort.missing]
        faults = {client: "is not connected" for client in wanted if client not in self._nodes}
        ledger = self.ledger if cohort.trains else Ledger()
        replies: dict[int, list[Tensor]] = {}
        hashes: dict[int, str] = {}
        to_ask = [client for client in wanted if client not in faults]
        forget: set[int] = set()
        while to_ask:
            letters: dict[int, Letter] = {}
            for client in to_ask:
                knows = set() if client in forget else visit.told.get(client, set())
                header, tensors, hashes[client] = ask.letter(client, knows)
                known = visit.replies.get((ask.count, client, hashes[client]))
                if known is not None:
                    replies[client] = known
                    continue
                letters[client] = Letter(self._nodes[client], ask.kind, pack(header, tensors))
                told = {what for kind, what in header["places"] if kind == SHARED}
                visit.told.setdefault(client, set()).update(told)
                ledger.down += sum(leaf.nbytes for leaf in tensors.values())
            if not letters:
                break
            ledger.exchanges += 1
            outcome = exchange(
                self.grid,
                letters,
                self._seconds(visit),
                f"{ask.cohort.round}.{ask.count}",
                lambda client, content: self._accept(ask, client, form, content),
            )
            if outcome.strays:
                self.report(f"round {cohort.round}: {outcome.strays} replies that nobody asked for were thrown away")
            faults |= outcome.faults
            # A node that was restarted in the middle of a round has forgotten what it was sent; once it is sent again.
            asked_again = [c for c, reply in outcome.replies.items() if isinstance(reply, _Missing)]
            faults |= {c: "forgets what it is sent" for c in asked_again if c in forget}
            to_ask = [c for c in asked_again if c not in forget]
            forget |= set(to_ask)
            for client, reply in outcome.replies.items():
                if not isinstance(reply, _Missing):
                    replies[client] = reply
                    visit.replies[ask.count, client, hashes[client]] = reply
                    ledger.up += sum(leaf.nbytes for leaf in reply)
        if cohort.trains:
            for client, reason in self._too_large(replies).items():
                faults[client] = reason
                del replies[client]
        return replies, faults

    def _seconds(self, visit: Visit) -> float:
        """Return how long the next exchange may take; OutOfTime where the attempt is over."""
        left = visit.ends - time.monotonic()
        if left <= 0:
            raise OutOfTime
        return min(self.terms.exchange_seconds, left)

    def _accept(self, ask: _Request, client: int, form: Tree, content: Any) -> list[Tensor] | _Missing:
        """Return the tensors of a reply that has the right header, sizes, types, shapes, and finite numbers only."""
        expected = list(leaves(form, but=Own))
        size, most = bytes_of(content), sum(leaf.nbytes for leaf in expected) + HEADER_BYTES
        if size > most:
            raise BadMessage(f"sent {size:,} bytes where {most:,} are the most")
        header = _told(content)
        for key, value in (ask.header(client) | {"name": self._names[client]}).items():
            if header.get(key) != value:
                raise BadMessage(f"answered for {key} {header.get(key)!r} and not {value!r}")
        if "missing" in header:
            return _Missing(header["missing"])
        if set(content[TENSORS]) != {str(place) for place in range(len(expected))}:
            raise BadMessage(f"sent {len(content[TENSORS])} tensors instead of {len(expected)}")
        tensors = tensors_of(content)
        reply = [tensors[str(place)] for place in range(len(expected))]
        for leaf, like in zip(reply, expected, strict=True):
            if leaf.dtype != like.dtype or leaf.shape != like.shape:
                raise BadMessage(f"sent {_words(leaf)} instead of {_words(like)}")
            if not all_finite(leaf):
                raise BadMessage(f"sent NaN or infinity in {ask.task}")
        return reply

    def _too_large(self, replies: dict[int, list[Tensor]]) -> dict[int, str]:
        """Return the clients with a vector that is far longer than the median of the cohort's.

        The lower of two medians is taken, so that among two clients the longer one is found.
        """
        faults: dict[int, str] = {}
        limit = self.terms.norm_limit
        if not limit or len(replies) < 2:
            return faults
        for place, like in enumerate(next(iter(replies.values()))):
            if not like.is_floating_point() or like.numel() < 2:  # single numbers are counts, and these differ
                continue
            norms = {
                client: float(torch.linalg.vector_norm(reply[place].double())) for client, reply in replies.items()
            }
            median = sorted(norms.values())[(len(norms) - 1) // 2]
            for client, norm in norms.items():
                if norm > limit * median > 0:
                    faults[client] = f"sent a vector {norm / median:.3g} times as long as the median of the round"
        return faults

    def form_of_reply(
        self, task: Callable[..., Tree], arguments: Sequence[Everyone | Each], static: dict[str, int]
    ) -> Tree:
        """Return what one client's reply to a task looks like: the task is rehearsed once, on a made-up client."""
        zeros = [
            map_tree(
                lambda leaf, argument=argument: torch.zeros_like(leaf[0] if isinstance(argument, Each) else leaf),
                argument.value,
            )
            for argument in arguments
        ]
        shapes = tuple((leaf.shape, leaf.dtype) for tree in zeros for leaf in leaves(tree))
        key = (task.__name__, tuple(sorted(static.items())), shapes)
        if key not in self._forms:
            self._forms[key] = task(self._made_up(), *zeros, **static)
        return self._forms[key]

    def _made_up(self) -> Client:
        agreed = self.agreement
        kind = np.int64 if agreed.tokens else np.uint8 if agreed.normalise else np.float32
        samples = Samples(
            x=np.zeros((2, *agreed.input_shape), dtype=kind),
            y=np.zeros(2, dtype=np.int64),
            classes=agreed.classes,
            normalise=agreed.normalise,
            tokens=agreed.tokens,
        )
        zeros = np.zeros(2, dtype=np.int64)
        made_up = assemble(samples, zeros, zeros.astype(np.int8), 1, "made up")
        return Client(
            federation=made_up,
            seed=0,
            id=torch.tensor(0),
            round=torch.tensor(0),
            offset=made_up.offset[:, 0],
            count=made_up.count[:, 0],
            capacity=(2, 0, 0),
            dtype=self.dtype,
        )


def digest(leaf: Tensor) -> str:
    """Return a hash of a tensor's type, shape and numbers."""
    plain = leaf.detach().cpu().contiguous()
    content = repr((plain.dtype, tuple(plain.shape))).encode() + plain.numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:32]


def _told(content: Any) -> dict[str, Any]:
    """Return the header of a reply; BadMessage where it is a refusal."""
    header = header_of(content)
    if "refusal" in header:
        raise BadMessage(str(header["refusal"])[:300])
    return header


def _words(leaf: Tensor) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
