"""Faster versions of keys and random choices of `pefll.core.randomness`: one kernel for all clients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from pefll.backend import client_axis
from pefll.backend.mapped import merge_mapped_axis
from pefll.core import randomness
from pefll.core.reference import fast


@custom_op("pefll::key", mutates_args=())
def _key(coordinates: list[Tensor], root: int, golden: int, multiply_1: int, multiply_2: int) -> Tensor:
    """Return a key for each client, [c], from coordinates [c]."""
    from pefll.backend.kernels import pointwise

    return pointwise.key(root, coordinates, golden, (multiply_1, multiply_2))


@custom_op("pefll::spread", mutates_args=())
def _spread(state: Tensor, count: int, golden: int, multiply_1: int, multiply_2: int) -> Tensor:
    """Return `count` new keys for each key: [c, keys, count] from [c, keys]."""
    from pefll.backend.kernels import pointwise

    spread = pointwise.spread(state.reshape(-1).contiguous(), count, golden, (multiply_1, multiply_2))
    return spread.view(*state.shape, count)


@custom_op("pefll::choose", mutates_args=())
def _choose(
    state: Tensor, total: Tensor, count: int, shuffles: int, golden: int, multiply_1: int, multiply_2: int
) -> Tensor:
    """Return random choices [c, draws, count] from keys and totals [c, draws]."""
    from pefll.backend.kernels import pointwise

    keys, totals = (part.reshape(-1).contiguous() for part in (state, total))
    chosen = pointwise.choose(keys, totals, count, shuffles, golden, (multiply_1, multiply_2))
    return chosen.view(*state.shape, count)


for _operation in (_key, _spread, _choose):
    merge_mapped_axis(_operation)


def _are_on_gpu(seed: int, purpose: str, *coordinates: Tensor | int, device: torch.device | None = None) -> bool:
    """Return whether the kernel supports these coordinates: each must be an int64 tensor [] on a GPU."""
    return bool(coordinates) and all(
        isinstance(one, Tensor) and one.dim() == 0 and client_axis.available(one, torch.int64) for one in coordinates
    )


def _is_on_gpu(state: Tensor, *rest: Tensor | int) -> bool:
    return client_axis.available(state, torch.int64)


@fast(randomness.key, when=_are_on_gpu)
def key(seed: int, purpose: str, *coordinates: Tensor | int, device: torch.device | None = None) -> Tensor:
    """Return the key [] for coordinates []."""
    tensors = [one.unsqueeze(0) for one in coordinates if isinstance(one, Tensor)]
    made: Tensor = _key(tensors, randomness.root_of(seed, purpose), *randomness.CONSTANTS)
    return made.squeeze(0)


@fast(randomness.spread, when=_is_on_gpu)
def spread(state: Tensor, count: int) -> Tensor:
    """Return `count` new keys for each key in `state` [...]; the result is [..., count]."""
    made: Tensor = _spread(state.reshape(1, -1), count, *randomness.CONSTANTS)
    return made.reshape(*state.shape, count)


@fast(randomness.choose, when=_is_on_gpu)
def choose(state: Tensor, total: Tensor | int, count: int) -> Tensor:
    """Return random choices [..., count] from keys and totals [...]."""
    if isinstance(total, int):
        total = torch.full((), total, dtype=torch.int64, device=state.device)
    keys, totals = state.reshape(1, -1), total.expand(state.shape).reshape(1, -1)
    chosen: Tensor = _choose(keys, totals, count, randomness.SHUFFLES, *randomness.CONSTANTS)
    return chosen.reshape(*state.shape, count)
