"""Random numbers with a client axis: keys and choices, one kernel each; `pefll.core.randomness` says what they are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from pefll.backend import client_axis
from pefll.backend.mapped import merge_mapped_axis


@custom_op("pefll::key", mutates_args=())
def _key(coordinates: list[Tensor], root: int, golden: int, multiply_1: int, multiply_2: int) -> Tensor:
    """Return a key [c] of coordinates [c]."""
    from pefll.backend.kernels import pointwise

    return pointwise.key(root, coordinates, golden, (multiply_1, multiply_2))


@custom_op("pefll::spread", mutates_args=())
def _spread(state: Tensor, count: int, golden: int, multiply_1: int, multiply_2: int) -> Tensor:
    """Return keys [c, keys, count] from keys [c, keys]."""
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


# How they are mapped.


for _operation in (_key, _spread, _choose):
    merge_mapped_axis(_operation)


def hashes(values: tuple[Tensor | int, ...]) -> bool:
    """Return whether `key` takes these: numbers that lie on a GPU, one for each client."""
    return bool(values) and all(
        isinstance(value, Tensor) and value.dim() == 0 and client_axis.available(value, torch.int64) for value in values
    )


def key(coordinates: tuple[Tensor, ...], root: int, golden: int, multiply_1: int, multiply_2: int) -> Tensor:
    """Return the key [] of coordinates []; see `pefll.core.randomness.key`."""
    made: Tensor = _key([one.unsqueeze(0) for one in coordinates], root, golden, multiply_1, multiply_2)
    return made.squeeze(0)


def spread(state: Tensor, count: int, golden: int, multiply_1: int, multiply_2: int) -> Tensor:
    """Return `count` keys for each of some, [..., count]; see `pefll.core.randomness.spread`."""
    made: Tensor = _spread(state.reshape(1, -1), count, golden, multiply_1, multiply_2)
    return made.reshape(*state.shape, count)


def choose(
    state: Tensor, total: Tensor, count: int, shuffles: int, golden: int, multiply_1: int, multiply_2: int
) -> Tensor:
    """Return random choices [..., count] from keys and totals [...]; see `pefll.core.randomness.choose`."""
    keys, totals = state.reshape(1, -1), total.expand(state.shape).reshape(1, -1)
    chosen: Tensor = _choose(keys, totals, count, shuffles, golden, multiply_1, multiply_2)
    return chosen.reshape(*state.shape, count)
