"""Work on a GPU that is recorded once and replayed, because launching it takes longer than doing it."""

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

# Fewer repetitions than this are not worth a recording, for which three of them are made one by one.
MIN_REPETITIONS = 16

# So many steps launch every kernel that more of them would; see `few_in_warm_up`.
WARM_UP_STEPS = 4

T = TypeVar("T")
# Of a context, which threads that do a part of its work are started with: another thread may compute meanwhile.
_warms_up: ContextVar[bool] = ContextVar("warms_up", default=False)
_overwrites: ContextVar[bool] = ContextVar("overwrites", default=False)


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Record what the block launches, in a stream, which need not be the current one.

    Python collects no garbage meanwhile: it may hold the graph of an engine that nobody uses any more, and freeing that
    in the middle of a recording would break it.
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
    """Launch in the block what a recording will launch, one by one: loops over steps end after the first few.

    Libraries choose their kernels and fill their caches, Triton compiles its own, and none of that may happen in a
    recording. A client's later steps bring nothing new. What is computed is good for nothing.
    """
    before = _warms_up.set(True)
    try:
        yield
    finally:
        _warms_up.reset(before)


def few_in_warm_up(steps: Iterable[T]) -> Iterable[T]:
    """Return the steps of a loop; in a rehearsal only the first few.

    The first has no velocity, and the others have; 1 and multiples of 16, as 0 is, are special to Triton; and rows of
    samples lie at multiples of 8 bytes, so that every other one is at a multiple of 16.
    """
    return itertools.islice(steps, WARM_UP_STEPS) if _warms_up.get() else steps


@contextmanager
def overwriting() -> Iterator[None]:
    """Say that the states in the block are nobody else's: what is not needed any more may be written to."""
    before = _overwrites.set(True)
    try:
        yield
    finally:
        _overwrites.reset(before)


def may_overwrite() -> bool:
    """Return whether a new state may be written in place of the old one, by who knows that nobody reads that again."""
    return _overwrites.get()


def worth_recording(value: Tensor, times: int) -> bool:
    """Return whether `repeat` should be used for a value: on a GPU, for enough repetitions, where nothing forbids it.

    Who records already gets every step as it comes. Who differentiates would not see steps that are replayed. And the
    default stream cannot be recorded; engines have streams of their own.
    """
    if _warms_up.get() or times < MIN_REPETITIONS or not value.is_cuda or is_differentiated(value):
        return False
    current = torch.cuda.current_stream(value.device)
    return current != torch.cuda.default_stream(value.device) and not torch.cuda.is_current_stream_capturing()


def is_differentiated(value: Tensor) -> bool:
    """Whether somebody outside differentiates with respect to a value, or might."""
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
        step: of the repetition's number, int64 [], and a state; returns the next one, which may lie in the same memory.
        state: two tensors on a GPU, maybe with axes that `vmap` hides; the second may be None before the first step.
        times: at least 2.
    """
    i = torch.zeros((), dtype=torch.int64, device=state[0].device)
    # Twice one by one: libraries choose their kernels, and Triton compiles its own, for what a recording will see. The
    # first time a state may still be the same for all clients; from the second on each has its own.
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
