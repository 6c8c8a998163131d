"""Tile sizes for tensor cores. The tiles must fit into the GPU's shared memory."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

SMALLEST = 16  # the smallest side of a tile for tensor cores


def side(size: int, most: int) -> int:
    """Return the side of a tile for `size` numbers: a power of two, from SMALLEST to `most`."""
    return min(most, max(SMALLEST, triton.next_power_of_2(size)))


def shrunk(like: Tensor, rows: int, inner: int, columns: int, stages: int, precision: str) -> tuple[int, int, int]:
    """Return rows, inner side and stages of a product's tiles, reduced until the tiles fit into shared memory.

    For every stage that is loaded ahead, a product needs tiles [rows, inner] and [inner, columns]. tf32x3 needs a third
    more memory.
    """
    limit = shared_memory(like.device)
    while True:
        need = 4 * inner * (rows + columns) * max(1, stages - 1)
        if need * (4 if precision == "tf32x3" else 3) // 3 <= limit:
            return rows, inner, stages
        if stages > 2:
            stages = 2
        elif max(rows, inner) > SMALLEST:
            rows, inner = (rows // 2, inner) if rows >= inner else (rows, inner // 2)
        else:
            return rows, inner, stages


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use. Triton's interpreter has no limit."""
    if device.type != "cuda":
        return 1 << 30
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 1 << 16))


@cache
def processors(device: torch.device) -> int:
    """Return the number of a card's processors; for the interpreter, those of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
