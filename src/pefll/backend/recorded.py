"""CUDA graphs: work is recorded once and replayed, because launching small kernels takes longer than running them."""

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

# Fewer repetitions are not worth a recording, which itself runs three of them one by one.
MIN_REPETITIONS = 16

# Later steps launch no other kernels than these first ones; see `few_in_warm_up`.
WARM_UP_STEPS = 4

T = TypeVar("T")
# Context variables, not globals: other threads compute at the same time.
_warms_up: ContextVar[bool] = ContextVar("warms_up", default=False)
_overwrites: ContextVar[bool] = ContextVar("overwrites", default=False)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Record the work of the block in a stream.

    The garbage collector is off meanwhile. It might free the graph of an unused engine, which breaks a recording.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream):
            yield
    finally:
        if collected:
            gc.enable()


@contextmanager
def warm_up() -> Iterator[None]:
    """Run the block as a warm-up for a recording: loops over steps end after the first few.

    Libraries choose kernels and fill caches, and Triton compiles; none of that may happen in a recording. The results
    are not used.
    """
    before = _warms_up.set(True)
    try:
        yield
    finally:
        _warms_up.reset(before)


def few_in_warm_up(steps: Iterable[T]) -> Iterable[T]:
    """Return the steps of a loop; in a warm-up only the first few.

    These launch every variant of a kernel. The first step has no velocity. Triton compiles variants for 1, for
    multiples of 16, and for addresses that are multiples of 16 bytes, as every other row of samples is.
    """
    return itertools.islice(steps, WARM_UP_STEPS) if _warms_up.get() else steps


@contextmanager
def overwriting() -> Iterator[None]:
    """Allow the block to overwrite states: nobody else reads them."""
    before = _overwrites.set(True)
    try:
        yield
    finally:
        _overwrites.reset(before)


def may_overwrite() -> bool:
    """Return whether a new state may overwrite the old one, if the caller does not read that again."""
    return _overwrites.get()


def worth_recording(value: Tensor, times: int) -> bool:
    """Return whether to use `repeat` for a value on a GPU.

    Not for few repetitions, in a warm-up or inside another recording. Derivatives do not see replayed steps. The
    default stream cannot be recorded; engines have their own streams.
    """
    if _warms_up.get() or times < MIN_REPETITIONS or not value.is_cuda or is_differentiated(value):
        return False
    current = torch.cuda.current_stream(value.device)
    return current != torch.cuda.default_stream(value.device) and not torch.cuda.is_current_stream_capturing()


def is_differentiated(value: Tensor) -> bool:
    """Whether autograd or a transform may differentiate with respect to a value."""
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
        step: of the number i, int64 [], and a state; returns the next state, which may be in the same memory.
        state: two tensors on a GPU, mapped or not; the second may be None before the first step.
        times: at least 2.
    """
    i = torch.zeros((), dtype=torch.int64, device=state[0].device)
    # Two steps as a warm-up. In the first, all clients may still share one state; from the second on each has its own.
    second = step(i, *state)
    third = step(i.add_(1), *second)
    i.add_(1)
    held = (third[0].clone(), third[1].clone())
    del second, third
    graph = torch.cuda.CUDAGraph()
    with recording(graph, torch.cuda.current_stream(i.device)):
        for mine, after in zip(held, step(i, *held), strict=True):
            if after is not mine:
                mine.copy_(after)
        i.add_(1)
    for _ in range(times - 2):
        graph.replay()
    return held
