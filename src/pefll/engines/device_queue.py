"""Launch work on a device now and wait for it later, so that neither device nor host is idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from pefll.core.tree import Tree, map_tree
from pefll.engines.cohort import Engine

T = TypeVar("T")
_streams: dict[torch.device, torch.cuda.Stream] = {}  # one stream per device, for copies that wait for no other work


class RoundInputs(NamedTuple):
    """What a plan decides for a round, on the device. In `VectorEngine.inputs`, each has a leading axis of rounds.

    Attributes:
        clients: int64 [c], the clients of the round; None for uniform sampling.
        client_factor: [], factor of the clients' learning rates; None for 1.
        server_factor: [], factor of the server's learning rates; None for 1.
    """

    clients: Tensor | None = None
    client_factor: Tensor | None = None
    server_factor: Tensor | None = None

    def of_round(self, place: int) -> RoundInputs:
        """Return the inputs of one round, as views."""
        return RoundInputs(*(None if part is None else part[place] for part in self))


NO_INPUTS = RoundInputs()


class DeviceFuture(Generic[T]):
    """A result that a device may still be computing.

    Args:
        answer: tensors that are in the host's memory after the second event, or at once without events.
        read: turns the answer into the result.
        seconds: the time that the work took; 0 if it is not done yet.
        events: CUDA events before and after the work on a GPU; None if the work is done.

    Attributes:
        seconds: the time that the device worked; `wait` sets it. It excludes earlier work of the same stream. It
            includes delays by other streams.
    """

    def __init__(
        self,
        answer: Any,
        read: Callable[[Any], T],
        seconds: float = 0.0,
        events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None,
    ) -> None:
        self._answer, self._read, self.seconds, self._events = answer, read, seconds, events

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._events is None or self._events[1].query()  # type: ignore[no-untyped-call]

    def wait(self) -> T:
        """Wait for the result and return it."""
        if self._events is not None:
            began, ended = self._events
            ended.synchronize()
            self.seconds = began.elapsed_time(ended) / 1000
        return self._read(self._answer)


class Clock:
    """Measures the time from its construction to a result.

    Make a clock before you launch the work:

        clock = Clock(device)
        answer = work()
        return clock.future(answer, read)

    Args:
        device: does the work, in its current stream. On a CPU the work is done when `work` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.started = device, time.perf_counter()
        self.began: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.began.record(torch.cuda.current_stream(device))

    def future(self, answer: Tree, read: Callable[[Any], T]) -> DeviceFuture[T]:
        """Copy a tree of tensors to the host and return a future, whose result is `read(copy)`."""
        if self.began is None:
            return DeviceFuture(answer, read, time.perf_counter() - self.started)
        # The copies go to pinned memory. A copy to other memory would make the host wait for the device. Later work of
        # the stream starts after the copy, so a graph may overwrite `answer`.
        copied = map_tree(_sent_to_host, answer)
        ended = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        ended.record(torch.cuda.current_stream(self.device))
        return DeviceFuture(copied, read, events=(self.began, ended))


class DeviceQueue:
    """The training loop's interface to an engine. This base class serves engines that finish work before they return.

    An engine with an asynchronous device has an instance of a subclass, such as `CudaQueue`, in its attribute `queue`.

    Attributes:
        works_on: whether the device works while the host does something else.
        turn: makes a context in which the engine is used. On a GPU the context gives each engine its own stream.
        beside: makes a context for work that later rounds do not wait for. On a GPU both run at the same time.
    """

    works_on = False
    turn: Callable[[], AbstractContextManager[Any]] = nullcontext
    beside: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def launch(self, server: Tree, first: int, rounds: int) -> tuple[Tree, DeviceFuture[None]]:
        """Start rounds first..first+rounds-1.

        Returns:
            The server's state after these rounds, and a future. The future's `wait` raises PefllError if training
            diverged. On a GPU later rounds may overwrite the state: see `snapshot`.
        """
        started = time.perf_counter()
        server = self._engine.advance(server, first, rounds)
        return server, DeviceFuture(None, lambda _: None, time.perf_counter() - started)

    def snapshot(self, server: Tree) -> Tree:
        """Return a state that later rounds do not overwrite."""
        return server

    def repeated(self, function: Callable[[Tree], Tensor]) -> Callable[[Tree], Tensor]:
        """Return a version of `function` that is fast when called often: a GPU records its work at the first call.

        Each call overwrites the tensor that the call before returned.
        """
        return function


def queue_of(engine: Engine) -> DeviceQueue:
    """Return the engine's `queue`; a synchronous `DeviceQueue` if it has none."""
    queue = getattr(engine, "queue", None)
    return queue if isinstance(queue, DeviceQueue) else DeviceQueue(engine)


def copy_to_host(state: Tree, device: torch.device) -> DeviceFuture[Tree]:
    """Return a future of a state in the host's memory, copied after the earlier work of the current stream.

    Nothing may write to the state until the copy is done. A state on the host is not copied.
    """
    return Clock(device).future(state, lambda copy: copy)


def fetched(state: Tree, device: torch.device) -> Tree:
    """Return a state in the host's memory, without waiting for other work of the device.

    The caller must already have waited for the work that computes the state.
    """
    if device.type != "cuda":
        return state
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(_streams[device]):
        return copy_to_host(state, device).wait()


def _sent_to_host(tensor: Tensor) -> Tensor:
    try:
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # not enough memory to pin; `cpu()` waits for the device
        return tensor.cpu()
    return there.copy_(tensor, non_blocking=True)
