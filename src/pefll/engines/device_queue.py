"""Work is given to a device now and waited for later, so that neither the device nor the host stands idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pefll.core.tree import Tree, map_tree
from pefll.engines.cohort import Engine

T = TypeVar("T")
_streams: dict[torch.device, torch.cuda.Stream] = {}  # one for each device, for copies that wait for nothing else


class DeviceFuture(Generic[T]):
    """An answer that a device may still be working on.

    Attributes:
        seconds: how long the work took on its device, once `wait` has returned; waiting behind earlier work of the
            same stream is not counted, sharing the device with other streams is.
    """

    def __init__(self, clock: Clock, answer: Tree, read: Callable[[Any], T]) -> None:
        self._clock, self._read = clock, read
        self.seconds = 0.0
        if clock.began is None:
            self._answer = answer
            self.seconds = time.perf_counter() - clock.started
            return
        # Into pinned memory, or the copy would wait for the device. The copy is in the stream before any later work,
        # so a graph may write to `answer` again.
        self._answer = map_tree(_sent_to_host, answer)
        self._ended = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._ended.record(torch.cuda.current_stream(clock.device))

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._clock.began is None or self._ended.query()  # type: ignore[no-untyped-call]

    def wait(self) -> T:
        """Return the answer, as soon as it is there."""
        if self._clock.began is not None:
            self._ended.synchronize()
            self.seconds = self._clock.began.elapsed_time(self._ended) / 1000
        return self._read(self._answer)


class Clock:
    """Measures a piece of work from here to its answer.

    Made before the work is given to the device:

        clock = Clock(device)
        answer = work()
        return clock.future(answer, read)

    Args:
        device: that does the work, in its current stream; on a CPU it is done when `work` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.started = device, time.perf_counter()
        self.began: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.began.record(torch.cuda.current_stream(device))

    def future(self, answer: Tree, read: Callable[[Any], T]) -> DeviceFuture[T]:
        """Send a tensor, or several, to the host, where `read` makes of them what was asked for."""
        return DeviceFuture(self, answer, read)


class DeviceQueue:
    """How the training loop gives an engine work. This one is for engines that are done when they return.

    An engine whose device works on by itself has an attribute `queue` with another one, such as `CudaQueue`.

    Args:
        engine: that works.

    Attributes:
        works_on: whether the device goes on with its work while the host does something else.
    """

    works_on = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def launch(self, server: Tree, first: int, rounds: int) -> tuple[Tree, DeviceFuture[None]]:
        """Start rounds first..first+rounds-1.

        Returns:
            The state that the server will have after them, and the rounds under way. Waiting for these raises
            PefllError where training diverged. A GPU may use the memory of the state for later rounds: see `snapshot`.
        """
        clock = Clock(self._engine.device)
        server = self._engine.advance(server, first, rounds)
        return server, clock.future(torch.empty(0), lambda _: None)

    def snapshot(self, server: Tree) -> Tree:
        """Return the state as it is after the rounds launched so far; later rounds do not write to it."""
        return server

    def repeated(self, function: Callable[[Tree], Tensor]) -> Callable[[Tree], Tensor]:
        """Return `function` of a state, to be called with many states; a GPU records its work at the first call.

        The returned tensor is good until the next call.
        """
        return function

    def turn(self) -> AbstractContextManager[Any]:
        """Hold this while the engine is used beside others: on a GPU its work goes into a stream of its own."""
        return nullcontext()

    def beside(self) -> AbstractContextManager[Any]:
        """Hold this for work that later rounds need not wait for: on a GPU it goes on beside them."""
        return nullcontext()


def queue_of(engine: Engine) -> DeviceQueue:
    """Return the engine's own queue, or one that does everything at once."""
    queue = getattr(engine, "queue", None)
    return queue if isinstance(queue, DeviceQueue) else DeviceQueue(engine)


def copy_to_host(state: Tree, device: torch.device) -> DeviceFuture[Tree]:
    """Send a state to the host, after the work that the device has been given so far in the current stream.

    Args:
        state: that nobody writes to; where it lies on the host already, it is not copied.
        device: of the work.
    """
    return Clock(device).future(state, lambda copy: copy)


def fetched(state: Tree, device: torch.device) -> Tree:
    """Return a state in the host's memory, without waiting for what else the device has to do.

    Args:
        state: that the device is done with: somebody has waited for something that came after it.
        device: where it lies.
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
    except RuntimeError:  # so much memory cannot be pinned here; then the copy is waited for
        return tensor.cpu()
    return there.copy_(tensor, non_blocking=True)
