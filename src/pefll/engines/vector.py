"""The vector engine: all clients of a round as one leading axis, a whole round as one CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pefll.backend.recorded import overwriting, recording, rehearsal
from pefll.core.tree import Tree, leaves, map_tree
from pefll.data.client import Client
from pefll.data.federation import Federation
from pefll.engines.cohort import (
    BaseCohort,
    Ids,
    Ledger,
    check_cohort_size,
    client_to_blame,
    not_finite,
    sample_cohort,
    seen_and_new,
)
from pefll.engines.device_queue import Clock, DeviceFuture
from pefll.engines.mapping import check_mapped, saying_what_cannot_be_mapped
from pefll.engines.settings import EngineSettings
from pefll.methods.contract import Each, Everyone, Method, Problem

# Evaluation maps as many clients at once as have about this many samples together (with their padding), and personal
# models of about this many parameters.
SAMPLES_AT_ONCE = {"cuda": 1 << 16, "cpu": 1 << 12}
PARAMETERS_AT_ONCE = 1 << 28
CLIENTS_AT_ONCE = 65_535  # as many as a grid of CUDA programs has along its second axis


_gpu = threading.RLock()


def one_thread(device: torch.device) -> AbstractContextManager[Any]:
    """Let other threads wait with a GPU while the block is at work; on a CPU they need not.

    A recording would get, or be broken by, what another thread launches.
    """
    return _gpu if device.type == "cuda" else nullcontext()


@dataclass(eq=False, kw_only=True)
class VectorCohort(BaseCohort):
    """Clients as one axis: a task for one client is mapped over all of them."""

    federation: Federation
    problem: Problem
    seed: int
    dtype: torch.dtype
    round: Tensor
    capacity: tuple[int, int, int]
    trains: bool = False  # whether it is a round's, whose replies are checked
    healthy: Tensor | None = None  # whether all replies so far are finite, bool []
    blamed: Tensor | None = None  # the first client whose reply was not by its own fault, int64 []; -1 for none

    def _reach(self, task: Callable[..., Tree], arguments: tuple[Everyone | Each, ...], static: dict[str, int]) -> Tree:
        def one(id_: Tensor, offset: Tensor, count: Tensor, *values: Tree) -> Tree:
            client = Client(self.federation, self.seed, id_, self.round, offset, count, self.capacity, self.dtype)
            return task(client, *values, **static)

        values = [map_tree(self._cast, argument.value) for argument in arguments]
        dims = tuple(0 if isinstance(argument, Each) else None for argument in arguments)
        offset, count = self.federation.offset[:, self.ids].T, self.federation.count[:, self.ids].T
        with saying_what_cannot_be_mapped(self.problem):
            replies = torch.vmap(one, in_dims=(0, 0, 0, *dims))(self.ids, offset, count, *values)
        if self.trains:
            self._check(replies, [type(argument)(value) for argument, value in zip(arguments, values, strict=True)])
        if self.on_progress is not None:
            self.on_progress(False)
        return replies

    def anew(self) -> Self:
        """Return the same clients with nothing sent, counted or checked yet."""
        return replace(super().anew(), healthy=None, blamed=None)

    def _check(self, replies: Tree, sent: list[Everyone | Each]) -> None:
        """Note whether replies are finite, and whose are not; no number is looked at here."""
        for leaf in leaves(replies):
            finite = torch.isfinite(leaf).all()
            self.healthy = finite if self.healthy is None else self.healthy & finite
        blamed = client_to_blame(replies, self.ids, sent)
        self.blamed = blamed if self.blamed is None else torch.where(self.blamed < 0, blamed, self.blamed)

    def _cast(self, value: Tensor) -> Tensor:
        kind = self.dtype if value.is_floating_point() else value.dtype
        return value.to(self.federation.device, kind)


class VectorEngine:
    """Runs rounds with all clients of a cohort at once.

    Args:
        federation: the data; moved to `device` once.
        method: what to run.
        seed: of the run.
        clients_per_round: c; 0 for an engine that only evaluates.
        device: a CUDA device, where a round becomes one graph, or the CPU.
        dtype: of weights and inputs.
        precision: of products of float32 numbers on a GPU: float32, tf32 or bf16.
    """

    name = "vector"
    processes = 1

    def __init__(
        self,
        federation: Federation,
        method: Method[Any],
        seed: int,
        clients_per_round: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        precision: str = "float32",
    ) -> None:
        check_cohort_size(federation, clients_per_round)
        self._counts = federation.count.numpy(force=True)
        self.device = torch.device(device)
        with one_thread(self.device):
            self.federation = federation.to(self.device)
        self.method, self.seed, self.dtype = method, seed, dtype
        self.clients_per_round = clients_per_round
        self.breaks_off = self.device.type == "cpu"  # a graph that is being recorded is not to be broken off
        self.ledger = Ledger()
        self._capacity = _capacity(self._counts[:, : federation.num_seen])
        self._graph: _RoundGraph | None = None
        self.stream: torch.cuda.Stream | None = None
        self.beside: torch.cuda.Stream | None = None
        self.queues = self.device.type == "cuda"
        if self.queues:
            # Graphs are captured in these streams too: libraries keep scratch memory for each stream, and what is done
            # at the same time must not share it. Rounds come first; what is beside them gets what they leave free.
            self.stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            self.beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        EngineSettings.take(self, precision)

    def start(self) -> Tree:
        """Return the server's state before the first round."""
        check_mapped(self.method.problem)
        cohort = self._cohort(self._sample(torch.zeros((), dtype=torch.int64, device=self.device))[:1], 0, self.ledger)
        server = self.method.init(self.seed, cohort)
        return map_tree(cohort._cast, server)

    def launch(self, server: Tree, first: int, rounds: int) -> tuple[Tree, DeviceFuture[None]]:
        """Start rounds first..first+rounds-1: on a GPU they are queued, on a CPU they are done."""
        if self.queues and self._graph is None:
            self._graph = _RoundGraph(self, server)
        clock = Clock(self.device)  # compiling and recording are no part of a round
        if self._graph is not None:
            server, bad = self._graph.replay(server, first, rounds)
        else:
            bad = torch.tensor([-1, -1])
            for t in range(first, first + rounds):
                server, healthy, blamed = self._round(server, torch.full((), t))
                if not bool(healthy):
                    bad = torch.stack([torch.tensor(t), blamed])
                    break
        return server, clock.later(bad, self._raise_if_bad)

    def advance(self, server: Tree, first: int, rounds: int) -> Tree:
        """Return the server's state after rounds first..first+rounds-1, once they are done."""
        server, under_way = self.launch(server, first, rounds)
        under_way.wait()
        return server

    def snapshot(self, server: Tree) -> Tree:
        """Return a copy on a GPU, where the next round writes into the same memory; else the state itself."""
        return map_tree(torch.clone, server) if self.stream is not None else server

    def repeated(self, function: Callable[[Tree], Tensor]) -> Callable[[Tree], Tensor]:
        """Return `function` as a graph on a GPU, else itself."""
        return _Recorded(self, function) if self.stream is not None else function

    def turn(self) -> AbstractContextManager[Any]:
        """Make the engine's own stream the current one, on a GPU; what was begun before the turn comes first."""
        return nullcontext() if self.stream is None else self._turn(self.stream)

    @contextmanager
    def _turn(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with one_thread(self.device):
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                yield

    def weighed(self, clients: Ids, sums: Any, chooses: bool) -> Any:
        """Return the sums as they are: simulated clients do not lie about themselves."""
        del clients, chooses
        return sums

    def aside(self) -> AbstractContextManager[Any]:
        """Make another stream of the engine the current one, on a GPU; what the current one was given comes first."""
        if self.beside is None:
            return nullcontext()
        self.beside.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.beside)

    def cohorts(self, clients: Ids, as_new: bool = False) -> Iterator[tuple[Ids, VectorCohort]]:
        """Yield (clients, cohort) of clients with about equally many samples, so that little is padding."""
        for group, is_new in seen_and_new(self.federation, clients, as_new):
            yield from self._cohorts(group, is_new)

    def _cohorts(self, clients: Ids, is_new: bool) -> Iterator[tuple[Ids, VectorCohort]]:
        widths = self._counts[:, clients].max(axis=0)
        by_width = np.argsort(widths, kind="stable")[::-1]
        order, widths = clients[by_width], widths[by_width]
        most = min(CLIENTS_AT_ONCE, max(1, PARAMETERS_AT_ONCE // self.method.problem.model.size))
        start = 0
        while start < len(order):
            stop = start + min(most, max(1, SAMPLES_AT_ONCE[self.device.type] // max(1, int(widths[start]))))
            chosen = np.ascontiguousarray(order[start:stop])
            ids = torch.from_numpy(chosen).to(self.device)
            yield chosen, self._cohort(ids, 0, Ledger(), _capacity(self._counts[:, chosen]), is_new)
            start = stop

    def close(self) -> None:
        """Free the graphs and give torch its settings back."""
        with one_thread(self.device):
            for stream in (self.stream, self.beside):
                if stream is not None:
                    stream.synchronize()  # after an error there may be work left, whose memory others must not get
            self._graph = None
        EngineSettings.give_back(self)

    def _raise_if_bad(self, bad: Tensor) -> None:
        """Raise PefllError where there is a first round with a bad reply; bad: int64 [2], see `_RoundGraph`."""
        round_, client = bad.tolist()
        raise_if_bad(round_, None if client < 0 else self.federation.name_of(client))

    def _round(self, server: Tree, t: Tensor) -> tuple[Tree, Tensor, Tensor]:
        """Return the state after round t, whether all replies were finite, bool [], and else whose fault, int64 []."""
        cohort = self._cohort(self._sample(t), t, self.ledger, trains=True)
        server = self.method.round(server, cohort)
        healthy, blamed = cohort.healthy, cohort.blamed
        if healthy is None or blamed is None:  # nobody was asked
            return server, torch.full((), True, device=self.device), torch.full((), -1, device=self.device)
        return server, healthy, blamed

    def _sample(self, t: Tensor) -> Tensor:
        return sample_cohort(self.federation, self.seed, t, self.clients_per_round)

    def _cohort(
        self,
        ids: Tensor,
        t: Tensor | int,
        ledger: Ledger,
        capacity: tuple[int, int, int] | None = None,
        is_new: bool = False,
        trains: bool = False,
    ) -> VectorCohort:
        if isinstance(t, int):
            t = torch.full((), t, dtype=torch.int64, device=self.device)
        return VectorCohort(
            size=len(ids),
            ledger=ledger,
            federation=self.federation,
            problem=self.method.problem,
            seed=self.seed,
            dtype=self.dtype,
            ids=ids,
            is_new=is_new,
            round=t,
            capacity=capacity or self._capacity,
            trains=trains,
        )


class _RoundGraph:
    """A round as one CUDA graph: it reads and writes the same memory, where the round number is a counter.

    Attributes:
        bad: the first round with a reply that is not finite, and the client whose fault it was, int64 [2]; -1 for none.
    """

    def __init__(self, engine: VectorEngine, server: Tree) -> None:
        device = engine.device
        self.engine = engine
        self.server = map_tree(torch.clone, server)
        self.t = torch.zeros((), dtype=torch.int64, device=device)
        self.bad = torch.full((2,), -1, dtype=torch.int64, device=device)
        spare = engine.ledger.copy()
        side = engine.stream
        assert side is not None
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), rehearsal():
            for _ in range(2):
                engine._round(self.server, self.t)
        torch.cuda.current_stream(device).wait_stream(side)
        before = engine.ledger.copy()
        self.graph = torch.cuda.CUDAGraph()
        with recording(self.graph, side), overwriting():
            after, healthy, blamed = engine._round(self.server, self.t)
            put_back(self.server, after)
            self.bad.copy_(torch.where(healthy | (self.bad[0] >= 0), self.bad, torch.stack([self.t, blamed])))
            self.t.add_(1)
        self.cost = engine.ledger.since(before)
        engine.ledger = spare

    def replay(self, server: Tree, first: int, rounds: int) -> tuple[Tree, Tensor]:
        for mine, given in zip(leaves(self.server), leaves(server), strict=True):
            if mine.data_ptr() != given.data_ptr():
                mine.copy_(given)
                self.bad.fill_(-1)  # it may be another state than one that diverged
        self.t.fill_(first)
        for _ in range(rounds):
            self.graph.replay()
        self.engine.ledger.add(self.cost, rounds)
        return self.server, self.bad


class _Recorded:
    """A function of a state as one CUDA graph, captured at the first call and replayed at every one.

    It has memory of its own for intermediate values: rounds may go on at the same time.
    """

    def __init__(self, engine: VectorEngine, function: Callable[[Tree], Tensor]) -> None:
        self.engine, self.function = engine, function
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, state: Tree) -> Tensor:
        if self.graph is None:
            self.state = map_tree(torch.clone, state)
            self._capture()
            assert self.graph is not None
        map_tree(lambda mine, given: mine.copy_(given), self.state, state)
        self.graph.replay()
        return self.result

    def _capture(self) -> None:
        side, current = self.engine.beside, torch.cuda.current_stream(self.engine.device)
        assert side is not None
        side.wait_stream(current)
        with torch.cuda.stream(side), rehearsal():
            self.function(self.state)
        current.wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with recording(self.graph, side):
            self.result = self.function(self.state)


def put_back(old: Tree, new: Tree) -> Tree:
    """Write a new state to where the old one lies, and return that; what was written there already is not copied."""
    return map_tree(lambda there, value: there if value is there else there.copy_(value), old, new)


def raise_if_bad(round_: int, who: str | None = None) -> None:
    """Raise PefllError where a round was the first with a reply that is not finite; -1 where none was.

    Args:
        round_: which one.
        who: the name of the client whose reply it was, where somebody knows.
    """
    if round_ >= 0:
        raise not_finite("training", who, round_)


def _capacity(counts: Any) -> tuple[int, int, int]:
    """Return the most samples that any of the clients has, for each split; counts is [3, clients]."""
    train, validation, test = (int(row.max()) if row.size else 0 for row in counts)
    return train, validation, test
