"""Several runs of one method as one: the clients of all their seeds are one axis, so that a round is launched once.

A round with few clients does not fill a large GPU, and rounds on several streams get into each other's way. So where
runs that take turns come to the same rounds, these are done together. Every method's round is carried out as it is
written, one for each run; where it reaches the door to its clients it waits until all are there, and then one mapped
call does the work of everybody's clients. What a server does with the replies stays its own.

A run's numbers must not depend on its company. Everything random is keyed by the seed; our kernels split their sums by
the clients of one run; for what libraries do, a round is done both ways before the first one counts, and runs whose
bits differ go on side by side.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pefll.data.client import Client
from pefll.engines.cohort import Engine, client_to_blame
from pefll.engines.conversation import Jobs, conversation, worker
from pefll.engines.later import Clock, Later
from pefll.engines.mapping import saying_what_cannot_be_mapped
from pefll.engines.vector import CLIENTS_AT_ONCE, VectorCohort, VectorEngine, put_back, raise_if_bad
from pefll.errors import PefllError
from pefll.methods.contract import Each, Everyone
from pefll.ops.recorded import overwriting, recording, rehearsal
from pefll.ops.together import clients_of
from pefll.randomness import Seeds
from pefll.tree import Tree, leaves, map_tree, named_leaves

# Where rounds are done together: a CPU is busy with one run. Tests do it there nevertheless.
DEVICES = {"cuda"}
# Whether servers do their parts of a round at the same time, each on its engine's stream, or one after another.
BRANCHES = True


def join(engines: Sequence[Engine], exact: bool = True) -> Joint | None:
    """Let engines do their rounds together from now on, whenever they come to the same ones.

    Args:
        engines: of runs that take turns.
        exact: whether to leave it where a run would not be, bit for bit, what it is alone; checked on a GPU.

    Returns:
        What they have in common; None where it cannot be, and each goes on by itself.
    """
    members = [engine for engine in engines if isinstance(engine, VectorEngine)]
    if len(members) < max(2, len(engines)) or members[0].device.type not in DEVICES or why_not(members):
        return None
    joint = Joint(members, exact)
    for engine in members:
        engine.company = joint
    return joint


def why_not(engines: Sequence[VectorEngine]) -> str:
    """Return what differs between engines that would have to be the same, or "" where their rounds can be joined."""
    traits: dict[str, Callable[[VectorEngine], Any]] = {
        "device": lambda engine: (engine.device, engine.dtype),
        "clients per round": lambda engine: engine.clients_per_round,
        "samples": _samples,
        "settings": _settings,
        "model": _model,
    }
    for name, trait in traits.items():
        if any(trait(engine) != trait(engines[0]) for engine in engines[1:]):
            return name
    clients = len(engines) * engines[0].clients_per_round
    return "" if 0 < clients <= CLIENTS_AT_ONCE else "clients per round"


def _samples(engine: VectorEngine) -> tuple[Any, ...]:
    data = engine.federation
    arrays = tuple((part.data_ptr(), part.shape, part.dtype) for part in (data.x, data.y))
    return (*arrays, data.num_clients, data.classes, data.normalise, data.tokens)


def _settings(engine: VectorEngine) -> tuple[Any, ...]:
    method = engine.method
    return type(method), [getattr(method, each.name) for each in fields(method) if each.name != "problem"]


def _model(engine: VectorEngine) -> tuple[Any, ...]:
    model = engine.method.problem.model
    return str(model.module), [(name, value.tolist()) for name, value in model.constants.items()]


class Wish(NamedTuple):
    """The rounds first..last-1 of a state, which a run comes to next."""

    server: Tree
    first: int
    last: int


class Exchange(NamedTuple):
    """What one run asks of its clients: the arguments of `DoorCohort._reach`, and the cohort."""

    cohort: VectorCohort
    task: Callable[..., Tree]
    arguments: tuple[Everyone | Each, ...]
    static: dict[str, int]

    def alike(self) -> tuple[Any, ...]:
        """Return what must be the same for all runs."""
        name = getattr(self.task, "__qualname__", type(self.task))
        return name, [type(argument) for argument in self.arguments], self.static


@dataclass(eq=False, kw_only=True)
class JointCohort(VectorCohort):
    """The clients of one run, reached together with those of others."""

    ask: Callable[[Exchange], Tree]

    def _reach(self, task: Callable[..., Tree], arguments: tuple[Everyone | Each, ...], static: dict[str, int]) -> Tree:
        return self.ask(Exchange(self, task, arguments, static))


class Joint:
    """Engines that do rounds together.

    Args:
        engines: those for which `why_not` knows nothing.
        exact: see `join`.

    Attributes:
        rounds: that were done together, so far.
        differs: the parts of a state that are not, bit for bit, what they are alone; looked at on a GPU.
        refused: why rounds are not done together after all; "" where they are.
    """

    def __init__(self, engines: Sequence[VectorEngine], exact: bool = True) -> None:
        self.engines, self.exact = list(engines), exact
        self.rounds, self.refused = 0, ""
        self.differs: list[str] = []
        self._wishes: dict[VectorEngine, Wish] = {}
        self._agreed: dict[VectorEngine, tuple[int, int]] = {}
        self._under_way: dict[VectorEngine, tuple[Tree, Later[None]]] = {}
        self._graph: _JointGraph | None = None
        self.device, self.size = engines[0].device, engines[0].clients_per_round
        # All federations as one: theirs index the same samples, each through rows of its own.
        parts = [engine.federation for engine in engines]
        starts = list(accumulate((len(part.rows) for part in parts), initial=0))
        self.federation = replace(
            parts[0],
            rows=torch.cat([part.rows for part in parts]),
            offset=torch.cat([part.offset + start for part, start in zip(parts, starts, strict=False)], dim=1),
            count=torch.cat([part.count for part in parts], dim=1),
        )
        train, validation, test = (max(most) for most in zip(*(one._capacity for one in engines), strict=True))
        self.capacity = train, validation, test
        # Of each client of a round: its run, and where the federation of that run starts.
        self._run = torch.arange(len(engines), device=self.device).repeat_interleave(self.size)
        self._start = self._run * parts[0].num_clients
        self._roots: dict[str, Tensor] = {}
        self._bad_clients: dict[int, str] = {}  # of runs by their place: whose reply was not finite first, on a CPU
        # Kept apart from the engines' own streams, on which their servers do their parts.
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    def agree(self, engine: VectorEngine, server: Tree, first: int, last: int) -> Generator[None, None, int]:
        """Say which rounds come next; after a turn of everybody, return up to which they are to be done."""
        if self.refused:
            return last
        self._wishes[engine] = Wish(server, first, last)
        yield
        if engine not in self._agreed and self._all_wish_for(first):
            until = min(wish.last for wish in self._wishes.values())
            self._agreed = dict.fromkeys(self.engines, (first, until))
        return self._agreed[engine][1] if engine in self._agreed else last

    def counts_on(self, engine: VectorEngine) -> bool:
        """Whether all have agreed on rounds that an engine has not launched yet, or not taken over."""
        return engine in self._agreed

    def _all_wish_for(self, first: int) -> bool:
        wishes = self._wishes.values()
        return not self.refused and len(wishes) == len(self.engines) and all(wish.first == first for wish in wishes)

    def launch(self, engine: VectorEngine, first: int, rounds: int) -> tuple[Tree, Later[None]] | None:
        """Start rounds that were agreed on: all runs' when the first run comes, whose others then find theirs."""
        agreed = self._agreed.pop(engine, None)
        if agreed != (first, first + rounds):
            self._wishes.pop(engine, None)
            self._free()  # it records a graph of its own, for which there may be no memory beside
            return None
        if engine not in self._under_way and not self.refused:
            servers = [self._wishes[each].server for each in self.engines]
            self._wishes.clear()
            try:
                self._under_way = dict(zip(self.engines, self._launch(servers, first, rounds), strict=False))
            except BaseException:
                self._forget()  # what the others agreed on will not come
                raise
        return self._under_way.pop(engine, None)

    def close(self) -> None:
        """Free the graph, and forget what was agreed on: one of the engines does no rounds any more."""
        self._free()
        self._forget()

    def _free(self) -> None:
        if self._graph is not None and self.stream is not None:
            self.stream.synchronize()  # its memory must not be given to others while it is replayed
        self._graph = None

    def _forget(self) -> None:
        for promised in (self._wishes, self._agreed, self._under_way):
            promised.clear()

    def _refuse(self, error: Exception) -> None:
        """Let each run go on by itself from now on."""
        self.refused = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"seeds are trained side by side, not as one: {self.refused}", stacklevel=4)

    def _launch(self, servers: list[Tree], first: int, rounds: int) -> list[tuple[Tree, Later[None]]]:
        """Start rounds of all runs; return nothing where it turns out that they cannot be done together."""
        if self.stream is None:
            return self._at_once(servers, first, rounds)
        self._gather()
        with torch.cuda.stream(self.stream):
            self._graph = self._graph or self._recorded(servers, first)
            under_way = [] if self._graph is None else self._graph.replay(servers, first, rounds)
        for engine in self.engines:
            _wait(engine.stream, self.stream)
        self.rounds += rounds if under_way else 0
        return under_way

    def _at_once(self, servers: list[Tree], first: int, rounds: int) -> list[tuple[Tree, Later[None]]]:
        """Do rounds of all runs on a CPU; nothing where that fails, so that an error comes to the run it is of."""
        clock, bad = Clock(self.device), torch.full((len(servers),), -1)
        who: dict[int, str | None] = {}
        spare = [engine.ledger.copy() for engine in self.engines]
        try:
            with self._threads() as threads:
                for t in range(first, first + rounds):
                    servers, healthy = self.round(servers, torch.full((), t), threads)
                    for i in torch.nonzero(~healthy & (bad < 0)).flatten().tolist():
                        who[i] = self._bad_clients.pop(i, None)
                    bad = torch.where(healthy | (bad >= 0), bad, torch.full_like(bad, t))
        except PefllError as error:
            for engine, ledger in zip(self.engines, spare, strict=True):
                engine.ledger = ledger
            self._refuse(error)
            return []
        self.rounds += rounds
        return [
            (server, clock.later(bad[i], partial(_raise_if_bad, who=who.get(i)))) for i, server in enumerate(servers)
        ]

    def _recorded(self, servers: list[Tree], first: int) -> _JointGraph | None:
        """Return a round as a graph; None where that fails, and rounds recorded one by one may still work."""
        try:
            return _JointGraph(self, servers, first)
        except (RuntimeError, PefllError) as error:  # the card's memory may be too small for it, for example
            hidden = error.__context__
            if hidden is not None and not isinstance(hidden, Exception):
                raise hidden from None  # Ctrl-C, and then the recording complained of being broken off
            self._refuse(error)
            return None

    def round(
        self, servers: Sequence[Tree], t: Tensor, threads: Sequence[Jobs], in_place: bool = False
    ) -> tuple[list[Tree], Tensor]:
        """Return the servers' states after round t, and for each run whether its replies were finite, bool [runs].

        Args:
            servers: one for each run.
            t: int64 [].
            threads: one for each run, for its server's part of the round.
            in_place: whether states are written to where they were.
        """
        healthy = torch.ones(len(servers), dtype=torch.bool, device=self.device)
        with ExitStack() as stack:
            talks = []
            for engine, server, thread in zip(self.engines, servers, threads, strict=True):
                talks.append(conversation(self._part(engine, server, t, in_place), thread))
                stack.callback(talks[-1].close)
            asked, states = self._hear(talks, [None] * len(talks))
            while asked:
                replies, fine = self._reach(asked, t)
                healthy = healthy & fine
                asked, states = self._hear(talks, replies)
        return states, healthy

    def _part(
        self, engine: VectorEngine, server: Tree, t: Tensor, in_place: bool
    ) -> Callable[[Callable[[Any], Any]], Tree]:
        """Return one run's round, as a conversation with whoever reaches the clients; on a GPU, on its own stream."""
        branch = engine.stream if BRANCHES else self.stream

        def part(ask: Callable[[Any], Any]) -> Tree:
            def reach(exchange: Exchange) -> Tree:
                replies = ask(exchange)
                _wait(branch, self.stream)
                # Copied to where they would lie alone: how numbers are added may depend on their address.
                return map_tree(torch.clone, replies)

            _wait(branch, self.stream)
            with nullcontext() if branch is None else torch.cuda.stream(branch):
                alone = engine._cohort(engine._sample(t), t, engine.ledger)
                after = engine.method.round(server, JointCohort(**vars(alone), ask=reach))
                return put_back(server, after) if in_place else after

        return part

    def _hear(
        self, talks: list[Generator[Any, Any, Tree]], answers: Sequence[Any]
    ) -> tuple[list[Exchange], list[Tree]]:
        """Let one run after another go on until it reaches the door or ends; return what they ask, or their states."""
        asked, states = [], []
        for talk, answer in zip(talks, answers, strict=True):
            try:
                asked.append(talk.send(answer))
            except StopIteration as end:
                states.append(end.value)
        if self.stream is not None and BRANCHES:
            self._gather()
        if (asked and states) or any(one.alike() != asked[0].alike() for one in asked):
            raise PefllError("the runs do not ask the same of their clients")
        return asked, states

    def _reach(self, asked: list[Exchange], t: Tensor) -> tuple[list[Tree], Tensor]:
        """Do what all runs ask of their clients; return each one's replies, and which are finite, bool [runs]."""
        _, task, arguments, static = asked[0]
        runs, seeds = len(asked), tuple(engine.seed for engine in self.engines)

        def one(id_: Tensor, run: Tensor, offset: Tensor, count: Tensor, *values: Tree) -> Tree:
            seed = Seeds(seeds, run, self._roots)
            client = Client(self.federation, seed, id_, t, offset, count, self.capacity, asked[0].cohort.dtype)
            return task(client, *values, **static)

        values = [self._joined(asked, place) for place in range(len(arguments))]
        ids = torch.cat([exchange.cohort.ids for exchange in asked])
        places = ids + self._start
        offset, count = self.federation.offset[:, places].T, self.federation.count[:, places].T
        with clients_of(runs), saying_what_cannot_be_mapped(asked[0].cohort.problem):
            replies = torch.vmap(one)(ids, self._run, offset, count, *values)
        healthy = torch.ones(runs, dtype=torch.bool, device=self.device)
        for leaf in leaves(replies):
            healthy = healthy & torch.isfinite(leaf).reshape(runs, self.size, *leaf.shape[1:]).flatten(1).all(dim=1)
        of_run = [slice(i * self.size, (i + 1) * self.size) for i in range(runs)]
        if self.device.type == "cpu" and not bool(healthy.all()):
            self._blame(ids, values, replies, of_run)
        return [map_tree(lambda leaf, rows=rows: leaf[rows], replies) for rows in of_run], healthy

    def _blame(self, ids: Tensor, values: list[Tree], replies: Tree, of_run: list[slice]) -> None:
        """Note the name of the first client of each run whose reply is not finite, where none is noted."""
        for i, rows in enumerate(of_run):
            own, *sent = (map_tree(lambda leaf, rows=rows: leaf[rows], value) for value in (replies, *values))
            client = int(client_to_blame(own, ids[rows], map(Each, sent)))
            if client >= 0:
                self._bad_clients.setdefault(i, self.engines[i].federation.name_of(client))

    def _joined(self, asked: list[Exchange], place: int) -> Tree:
        """Return the argument at one place, of all runs, with a row for each client, [runs * c, ...]."""
        has_rows = isinstance(asked[0].arguments[place], Each)

        def rows(*parts: Tensor) -> Tensor:
            return torch.cat([part if has_rows else part.expand(self.size, *part.shape) for part in parts])

        return map_tree(rows, *(map_tree(one.cohort._cast, one.arguments[place].value) for one in asked))

    @contextmanager
    def _threads(self) -> Iterator[list[Jobs]]:
        """Yield a thread for each run, the same for several rounds: libraries keep what they need for each thread."""
        with ExitStack() as stack:
            yield [stack.enter_context(worker()) for _ in self.engines]

    def _gather(self) -> None:
        """Let what is launched together wait for what every run has launched."""
        for engine in self.engines:
            _wait(self.stream, engine.stream)


class _JointGraph:
    """A round of all runs as one CUDA graph; see `pefll.engines.vector`."""

    def __init__(self, joint: Joint, servers: list[Tree], first: int) -> None:
        self.joint, device = joint, joint.device
        engines = joint.engines
        self.servers = [map_tree(torch.clone, server) for server in servers]
        self.t = torch.full((), first, dtype=torch.int64, device=device)
        self.bad = torch.full((len(engines),), -1, dtype=torch.int64, device=device)
        spare = [engine.ledger.copy() for engine in engines]
        try:
            with joint._threads() as threads:
                with rehearsal():  # in the threads of the recording, since libraries keep what they need for each
                    joint.round(self.servers, self.t, threads)
                # Whole rounds: long loops of steps are recorded and repeated in both, with the kernels of what follows.
                joint.differs = self._differences(joint.round(self.servers, self.t, threads)[0])
                if joint.differs and joint.exact:
                    raise PefllError(f"they would not be what they are alone ({joint.differs[0]})")
                before = [engine.ledger.copy() for engine in engines]
                self.graph = torch.cuda.CUDAGraph()
                with recording(self.graph, joint.stream), overwriting():
                    _, healthy = joint.round(self.servers, self.t, threads, in_place=True)
                    self.bad.copy_(torch.where(healthy | (self.bad >= 0), self.bad, self.t))
                    self.t.add_(1)
            self.costs = [engine.ledger.since(then) for engine, then in zip(engines, before, strict=True)]
        finally:
            for engine, ledger in zip(engines, spare, strict=True):
                engine.ledger = ledger

    def _differences(self, after: list[Tree]) -> list[str]:
        """Return which parts of the states after a round are not, bit for bit, what the engines make of them alone."""
        joint, found = self.joint, []
        for engine, server, together in zip(joint.engines, self.servers, after, strict=True):
            _wait(engine.stream, joint.stream)
            with torch.cuda.stream(engine.stream):
                alone, *_ = engine._round(server, self.t)
            _wait(joint.stream, engine.stream)
            for (name, one), other in zip(named_leaves(alone), leaves(together), strict=True):
                bits = [torch.where(part.isnan(), 0, part).reshape(-1).view(torch.uint8) for part in (one, other)]
                if not (torch.equal(*bits) and torch.equal(one.isnan(), other.isnan())):
                    found.append(f"{name} of seed {engine.seed} by {float((one.double() - other).abs().max()):.1e}")
        return found

    def replay(self, servers: list[Tree], first: int, rounds: int) -> list[tuple[Tree, Later[None]]]:
        """Start rounds of the states that are given, in the current stream."""
        for i, (mine, given) in enumerate(zip(self.servers, servers, strict=True)):
            for old, new in zip(leaves(mine), leaves(given), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
                    self.bad[i].fill_(-1)  # it may be another state than one that diverged
        clock = Clock(self.joint.device)
        self.t.fill_(first)
        for _ in range(rounds):
            self.graph.replay()
        for engine, cost in zip(self.joint.engines, self.costs, strict=True):
            engine.ledger.add(cost, rounds)
        return [(server, clock.later(self.bad[i], _raise_if_bad)) for i, server in enumerate(self.servers)]


def _raise_if_bad(round_: Tensor, who: str | None = None) -> None:
    raise_if_bad(int(round_), who)


def _wait(stream: torch.cuda.Stream | None, for_: torch.cuda.Stream | None) -> None:
    """Let a stream wait for what another one has to do; on a CPU there is neither."""
    if stream is not None and for_ is not None and stream != for_:
        stream.wait_stream(for_)
