"""The vector engine's queue on a GPU. It has its own streams, and records a whole round as one CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from pefll.backend.recorded import capture, overwriting, warm_up
from pefll.core.tree import Tree, leaves, map_tree
from pefll.engines.cohort import Ledger
from pefll.engines.device_queue import Clock, DeviceFuture, DeviceQueue, RoundInputs
from pefll.methods.contract import Method

_gpu = threading.RLock()


def one_thread(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which only one thread at a time uses the GPUs; on a CPU it does nothing.

    While one thread captures a graph, a launch by another thread would join the graph or break it.
    """
    return _gpu if device.type == "cuda" else nullcontext()


class RecordableEngine(Protocol):
    """The interface of an engine whose rounds a `CudaQueue` records."""

    device: torch.device
    ledger: Ledger
    method: Method[Any]

    def inputs(self, first: int, rounds: int) -> RoundInputs:
        """Return what the plan decides for rounds first..first+rounds-1, one row for each round."""
        ...

    def checked_round(self, server: Tree, t: Tensor, given: RoundInputs) -> tuple[Tree, Tensor, Tensor]:
        """Return the state after round t, whether all replies were finite, bool [], and the client to blame."""
        ...

    def raise_if_bad(self, bad: Tensor) -> None:
        """Raise PefllError if there was a bad round; see `_RoundGraph.bad`."""
        ...


class CudaQueue(DeviceQueue):
    """Launches rounds and evaluations on a GPU without waiting for them. Evaluations run at the same time as rounds.

    Attributes:
        stream: CUDA stream of the rounds.
        side: CUDA stream of the evaluations.
    """

    works_on = True

    def __init__(self, engine: RecordableEngine) -> None:
        self.engine, self.device = engine, engine.device
        # Graphs are captured in these streams too. Libraries have scratch memory for each stream, and rounds and
        # evaluations must not share it. Rounds have priority.
        self.stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self.side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._graph: _RoundGraph | None = None

    def launch(self, server: Tree, first: int, rounds: int) -> tuple[Tree, DeviceFuture[None]]:
        """Launch rounds first..first+rounds-1; the first call records a round."""
        if self._graph is None:
            self._graph = _RoundGraph(self.engine, self.stream, server)
        clock = Clock(self.device)  # made here, so that it does not measure compiling and capturing
        server, bad = self._graph.replay(server, first, rounds)
        return server, clock.future(bad, self.engine.raise_if_bad)

    def snapshot(self, server: Tree) -> Tree:
        """Return a copy: the next round overwrites the state."""
        return map_tree(torch.clone, server)

    def repeated(self, function: Callable[[Tree], Tensor]) -> Callable[[Tree], Tensor]:
        """Return `function` as a graph."""
        return _Recorded(self, function)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Make the rounds' stream current. It first waits for the work of the stream that was current."""
        with one_thread(self.device):
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                yield

    def beside(self) -> AbstractContextManager[Any]:
        """Make the evaluations' stream current. It first waits for the work of the stream that was current."""
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.side)

    def close(self) -> None:
        """Free the graph."""
        with one_thread(self.device):
            for stream in (self.stream, self.side):
                stream.synchronize()  # after an error the GPU may still work, with the graph's memory
            self._graph = None


class _RoundGraph:
    """A round as one CUDA graph. It overwrites the server's state. The round number is a counter in device memory.

    The graph reads the clients of a round and the factors of learning rates from fixed places, which are filled before
    each replay.

    Attributes:
        bad: int64 [2], the first round with a reply that is not finite, and the client to blame; -1 for none.
    """

    def __init__(self, engine: RecordableEngine, side: torch.cuda.Stream, server: Tree) -> None:
        device = engine.device
        self.engine = engine
        self.server = map_tree(torch.clone, server)
        self.given = RoundInputs(*(None if part is None else part[0].clone() for part in engine.inputs(0, 1)))
        self.t = torch.zeros((), dtype=torch.int64, device=device)
        self.bad = torch.full((2,), -1, dtype=torch.int64, device=device)
        spare = engine.ledger.copy()
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), warm_up():
            for _ in range(2):
                engine.checked_round(self.server, self.t, self.given)
        torch.cuda.current_stream(device).wait_stream(side)
        before = engine.ledger.copy()
        self.graph = torch.cuda.CUDAGraph()
        # A step of Adam must not overwrite the state of a user's method, which may read the old state afterwards.
        may_overwrite = overwriting() if type(engine.method).__module__.startswith("pefll.methods.") else nullcontext()
        with capture(self.graph, side), may_overwrite:
            after, healthy, blamed = engine.checked_round(self.server, self.t, self.given)
            _copy_into(self.server, after)
            self.bad.copy_(torch.where(healthy | (self.bad[0] >= 0), self.bad, torch.stack([self.t, blamed])))
            self.t.add_(1)
        self.cost = engine.ledger.since(before)
        engine.ledger = spare

    def replay(self, server: Tree, first: int, rounds: int) -> tuple[Tree, Tensor]:
        for mine, given in zip(leaves(self.server), leaves(server), strict=True):
            if mine.data_ptr() != given.data_ptr():
                mine.copy_(given)
                self.bad.fill_(-1)  # the state is new; only the earlier one may have diverged
        self.t.fill_(first)
        inputs = self.engine.inputs(first, rounds)
        for place in range(rounds):
            for part, rows in zip(self.given, inputs, strict=True):
                if part is not None and rows is not None:
                    part.copy_(rows[place])
            self.graph.replay()
        self.engine.ledger.add(self.cost, rounds)
        return self.server, self.bad


class _Recorded:
    """A function of a state as one CUDA graph, captured at the first call and replayed at every call.

    The graph has its own memory for intermediate values, so rounds may run at the same time.
    """

    def __init__(self, queue: CudaQueue, function: Callable[[Tree], Tensor]) -> None:
        self.queue, self.function = queue, function
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
        side, current = self.queue.side, torch.cuda.current_stream(self.queue.device)
        side.wait_stream(current)
        with torch.cuda.stream(side), warm_up():
            self.function(self.state)
        current.wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with capture(self.graph, side):
            self.result = self.function(self.state)


def _copy_into(old: Tree, new: Tree) -> Tree:
    """Copy a new state into the old state's memory and return the old state; the same tensor is not copied."""
    return map_tree(lambda there, value: there if value is there else there.copy_(value), old, new)
