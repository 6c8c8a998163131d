"""Randomness is a function, not a state.

Every random number of a run is a pure function of (seed, purpose, round, client), in 64-bit integer arithmetic. It has
the same value on a CPU, on a GPU and inside a CUDA graph, where the round is a counter in device memory. So clients
store no random state between rounds. A resumed run continues bit-exactly. If a client drops out,
the batches of the others stay the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pefll.core import process
from pefll.core.reference import reference

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
# Number of shuffles in `choose`. tests/test_randomness.py shows that they make all pairs equally likely.
SHUFFLES = 20


def _signed(value: int) -> int:
    """Return the signed int64 that has the same bits as the unsigned `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


CONSTANTS = tuple(_signed(value) for value in (_GOLDEN, _MULTIPLY_1, _MULTIPLY_2))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 values right and fill with zeros; torch's own shift fills with the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _scramble(x: Tensor) -> Tensor:
    """Return a bijective hash of int64 values (the finaliser of SplitMix64)."""
    x = (x ^ _shift(x, 30)) * _signed(_MULTIPLY_1)
    x = (x ^ _shift(x, 27)) * _signed(_MULTIPLY_2)
    return x ^ _shift(x, 31)


def root_of(seed: int, purpose: str) -> int:
    """Return a 64-bit hash of a seed and a purpose, computed on the host."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "little"))


@reference
def key(seed: int, purpose: str, *coordinates: Tensor | int, device: torch.device | None = None) -> Tensor:
    """Return keys, each of which gives one stream of random numbers: int64 [...], in the shape of the coordinates.

    Args:
        seed: seed of the run.
        purpose: use of the numbers, for example `"cohort"`.
        coordinates: integers, or int64 tensors of one shape, such as round and client.
        device: device of the keys if no coordinate is a tensor.
    """
    for coordinate in coordinates:
        if isinstance(coordinate, Tensor):
            device = coordinate.device
    # A CUDA graph can capture `full`, which is a kernel. It cannot capture a copy from the host.
    state = torch.full((), root_of(seed, purpose), dtype=torch.int64, device=device)
    for coordinate in coordinates:
        state = _scramble((state ^ coordinate) + _signed(_GOLDEN))
    return state


@reference
def spread(state: Tensor, count: int) -> Tensor:
    """Return `count` independent keys for each key int64 [...], as int64 [..., count]."""
    steps = torch.arange(1, count + 1, device=state.device) * _signed(_GOLDEN)
    return _scramble(state.unsqueeze(-1) + steps)


@reference
def choose(state: Tensor, total: Tensor | int, count: int) -> Tensor:
    """Return `count` different integers below `total` in random order, int64 [..., count].

    The swap-or-not shuffle of Hoang, Morris and Rogaway maps each of 0..count-1 to its new number. It never stores all
    `total` numbers, so the cost does not depend on `total`. If `count` exceeds `total`, the first `total` entries are a
    permutation and the rest repeat it.

    Args:
        state: int64 [...], one key per draw.
        total: int64 broadcastable to [...], at least 1.
        count: number of integers to choose.
    """
    if isinstance(total, int):
        total = torch.full((), total, dtype=torch.int64, device=state.device)
    total = total.unsqueeze(-1)
    drawn = spread(state, 3 * SHUFFLES)
    mirrors = torch.remainder(drawn[..., :SHUFFLES], total)
    factors = drawn[..., SHUFFLES : 2 * SHUFFLES]
    terms = drawn[..., 2 * SHUFFLES :]
    card = torch.remainder(torch.arange(count, device=state.device), total) + torch.zeros_like(state).unsqueeze(-1)
    for shuffle in range(SHUFFLES):
        partner = torch.remainder(mirrors[..., shuffle, None] - card, total)
        # One coin decides whether card and partner swap: the sign bit of a universal hash of the larger of the two.
        coin = torch.maximum(card, partner) * factors[..., shuffle, None] + terms[..., shuffle, None]
        card = torch.where(coin < 0, partner, card)
    return card


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Return a NumPy generator for random draws on the host, such as partitions and splits."""
    return np.random.default_rng(root_of(seed, purpose) & ((1 << 64) - 1))


@contextmanager
def initial_weights(seed: int, purpose: str) -> Iterator[None]:
    """Seed torch's CPU generator for layers that draw initial weights inside the block; restore it afterwards.

    All threads share this generator, so only one thread at a time can be in the block.
    """
    with process.lock, torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would also change a user's CUDA generators.
        torch.default_generator.manual_seed(root_of(seed, purpose) & ((1 << 63) - 1))
        yield
