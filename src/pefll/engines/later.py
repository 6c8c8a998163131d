"""Results that are on their way: a device is given work, and the host goes on until it needs the answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Later(Generic[T]):
    """A small answer that a device may still be working on.

    Attributes:
        seconds: how long the work took on its device, once `wait` has returned; waiting behind earlier work of the
            same stream is not counted, sharing the device with other streams is.
    """

    def __init__(self, clock: Clock, answer: Tensor, read: Callable[[Tensor], T]) -> None:
        self._clock, self._read = clock, read
        self.seconds = 0.0
        if clock.began is None:
            self._answer = answer
            self.seconds = time.perf_counter() - clock.started
            return
        # Into pinned memory, or the copy would wait for the device. The copy is in the stream before any later work,
        # so a graph may write to `answer` again.
        self._answer = torch.empty(answer.shape, dtype=answer.dtype, pin_memory=True)
        self._answer.copy_(answer, non_blocking=True)
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
        return clock.later(answer, read)

    Args:
        device: that does the work, in its current stream; on a CPU it is done when `work` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.started = device, time.perf_counter()
        self.began: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.began.record(torch.cuda.current_stream(device))

    def later(self, answer: Tensor, read: Callable[[Tensor], T]) -> Later[T]:
        """Send a small tensor to the host, where `read` makes of it what was asked for."""
        return Later(self, answer, read)
