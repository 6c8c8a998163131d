"""CUDA graphs: capture work once and replay it, because launching small kernels takes longer than running them."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

# With fewer repetitions a graph saves no time, because capturing calls the step three times from Python.
MIN_REPETITIONS = 16

# This many first steps launch every kernel variant; see `few_in_warm_up`.
WARM_UP_STEPS = 4

T = TypeVar("T")
# Context variables, because each thread needs its own values.
_warms_up: ContextVar[bool] = ContextVar("warms_up", default=False)
_overwrites: ContextVar[bool] = ContextVar("overwrites", default=False)


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Capture the GPU work of the `with` block in a graph, on a stream.

    The garbage collector is off during the capture. It might free another graph, which would break the capture.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream):
            yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def warm_up() -> Iterator[None]:
    """Run the `with` block as the warm-up for a capture: loops over steps end after the first few.

    In a warm-up, libraries choose kernels and fill caches, and Triton compiles. A capture allows none of this. The
    results of a warm-up are not used.
    """
    before = _warms_up.set(True)
    try:
        yield
    finally:
        _warms_up.reset(before)


def few_in_warm_up(steps: Iterable[T]) -> Iterable[T]:
    """Return the steps of a loop; in a warm-up only the first four.

    Four steps launch every kernel variant. The first step uses another variant, because it has no momentum. Triton also
    compiles variants for sizes (1, multiples of 16) and for 16-byte alignment, which alternates between rows.
    """
    return itertools.islice(steps, WARM_UP_STEPS) if _warms_up.get() else steps


@contextmanager
def overwriting() -> Iterator[None]:
    """Allow in-place updates of states inside the `with` block."""
    before = _overwrites.set(True)
    try:
        yield
    finally:
        _overwrites.reset(before)


def may_overwrite() -> bool:
    """Return whether the old state may be overwritten."""
    return _overwrites.get()


def worth_capturing(value: Tensor, times: int) -> bool:
    """Return whether to use `repeat` for a value.

    It is false on a CPU, for fewer than 16 steps, during warm-up, and inside another capture. It is false if `value` is
    differentiated, because autograd cannot differentiate through a replayed graph. It is also false on the default
    stream, because CUDA cannot capture that stream. Engines have their own streams.
    """
    if _warms_up.get() or times < MIN_REPETITIONS or not value.is_cuda or is_differentiated(value):
        return False
    current = torch.cuda.current_stream(value.device)
    return current != torch.cuda.default_stream(value.device) and not torch.cuda.is_current_stream_capturing()


def is_differentiated(value: Tensor) -> bool:
    """Return whether autograd or a transform may differentiate with respect to a value."""
    transforms = retrieve_all_functorch_interpreters()
    mapped_only = all(transform.key() == TransformType.Vmap for transform in transforms)
    return not mapped_only or (value.requires_grad and torch.is_grad_enabled())


def repeat(
    step: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]],
    state: tuple[Tensor, Tensor | None],
    times: int,
) -> tuple[Tensor, Tensor]:
    """Return the state after `state = step(i, *state)` for i = 0, 1, ..., times - 1.

    Args:
        step: called with i, int64 [], and a state. Returns the next state, which may use the same memory.
        state: two tensors on a GPU, inside vmap or not. The second may be None before the first step.
        times: number of steps, at least 2.
    """
    i = torch.zeros((), dtype=torch.int64, device=state[0].device)
    # Do two steps without a graph, as a warm-up. Before the first step all clients may share one state. After it, each
    # client has its own.
    second = step(i, *state)
    third = step(i.add_(1), *second)
    i.add_(1)
    held = (third[0].clone(), third[1].clone())
    del second, third
    graph = torch.cuda.CUDAGraph()
    with capture(graph, torch.cuda.current_stream(i.device)):
        for mine, after in zip(held, step(i, *held), strict=True):
            if after is not mine:
                mine.copy_(after)
        i.add_(1)
    for _ in range(times - 2):
        graph.replay()
    return held
