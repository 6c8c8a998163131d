"""Work on a GPU that is recorded once and replayed, because launching it takes longer than doing it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Fewer repetitions than this are not worth a recording, which takes about as long as two of them.
WORTH = 16

_allowed = True


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None, pool: Any = None) -> Iterator[None]:
    """Record what the block launches, in a stream, which need not be the current one.

    Python collects no garbage meanwhile: it may hold the graph of an engine that nobody uses any more, and freeing that
    in the middle of a recording would break it.
    """
    collected = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
    finally:
        if collected:
            gc.enable()


@contextmanager
def in_full() -> Iterator[None]:
    """Launch everything in the block one by one, as a recording of the whole will do."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


def repeats(value: Tensor, times: int) -> bool:
    """Return whether `repeat` should be used: on a GPU, where nobody records already, for enough repetitions."""
    return _allowed and times >= WORTH and value.is_cuda and not torch.cuda.is_current_stream_capturing()


def repeat(
    step: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], state: tuple[Tensor, Tensor], times: int
) -> tuple[Tensor, Tensor]:
    """Return the state after `state = step(i, *state)` for i = 0, 1, ..., times - 1.

    Args:
        step: of the repetition's number, int64 [], and two tensors; returns two of the same shapes.
        state: two tensors on a GPU, maybe with axes that `vmap` hides.
        times: at least 1.
    """
    device = state[0].device
    i = torch.zeros((), dtype=torch.int64, device=device)
    state = step(i, *state)  # libraries choose their kernels, and what is the same for all clients gets their axis
    i.add_(1)
    held = (state[0].clone(), state[1].clone())
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream(device)
    with recording(graph, None if current == torch.cuda.default_stream(device) else current):
        for mine, after in zip(held, step(i, *held), strict=True):
            mine.copy_(after)
        i.add_(1)
    for _ in range(times - 1):
        graph.replay()
    return held
