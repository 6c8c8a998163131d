"""Triton kernels for the input gradient of a convolution with pooling, bias and ReLU, with a client axis.

The gradient of a pixel is a sum over the pooling cells whose windows contain it. `pefll.backend.kernels.convolution`
explains windows, positions and routes. For bfloat16 see `conv_backward_bf16`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from pefll.backend.geometry import Geometry
from pefll.backend.kernels.tiles import shrunk, side


@triton.jit
def _spread_back(
    w, out, sw_c, CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr,
    PAD: tl.constexpr, POOL: tl.constexpr, SIDE: tl.constexpr, FIRST_Y: tl.constexpr, FIRST_X: tl.constexpr,
    CELLS_Y: tl.constexpr, CELLS_X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write filters [co, ci, kh, kw] as [cell, position, pixel, ci, co]; zero if a position does not read a pixel."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    SIZE: tl.constexpr = CELLS_Y * CELLS_X * POOL * POOL * SIDE * SIDE * CI * CO
    co, ci = at % CO, (at // CO) % CI
    pixel = (at // (CO * CI)) % (SIDE * SIDE)
    place = (at // (CO * CI * SIDE * SIDE)) % (POOL * POOL)
    cell = at // (CO * CI * SIDE * SIDE * POOL * POOL)
    ky = pixel // SIDE + PAD - ((FIRST_Y + cell // CELLS_X) * POOL + place // POOL) * STRIDE
    kx = pixel % SIDE + PAD - ((FIRST_X + cell % CELLS_X) * POOL + place % POOL) * STRIDE
    leads = (at < SIZE) & (ky >= 0) & (ky < KH) & (kx >= 0) & (kx < KW)
    value = tl.load(w + client * sw_c + ((co * CI + ci) * KH + ky) * KW + kx, mask=leads, other=0.0)
    tl.store(out + client * SIZE + at, value, mask=at < SIZE)


@triton.jit
def blocks_of(B, H: tl.constexpr, W: tl.constexpr, SIDE: tl.constexpr, BY_BLOCK: tl.constexpr, BM: tl.constexpr):
    """Return each block's sample, its row and column in the picture, and whether it exists. A program has many blocks.

    With BY_BLOCK, consecutive rows are the same block of different samples. A program with blocks at the border then
    has fewer cells to add.
    """
    BH: tl.constexpr = (H + SIDE - 1) // SIDE
    BW: tl.constexpr = (W + SIDE - 1) // SIDE
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    if BY_BLOCK:
        b, block = rows % B, rows // B
    else:
        b, block = rows // (BH * BW), rows % (BH * BW)
    return b, block // BW, block % BW, (b < B) & (block < BH * BW)


@triton.jit
def store_pixels(
    dx, total, b, ry, rx, there, qy, qx, ci, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    """Write the columns (qy, qx, ci) of blocks (b, ry, rx) to one client's pictures [b, h, w, ci]."""
    iy, ix = (ry * SIDE)[:, None] + qy[None, :], (rx * SIDE)[:, None] + qx[None, :]
    at = ((b[:, None] * H + iy) * W + ix) * CI + ci[None, :]
    tl.store(dx + at, total, mask=there[:, None] & (iy < H) & (ix < W) & (ci < CI)[None, :])


@triton.jit
def cells_of(
    ry, rx, there, PH: tl.constexpr, PW: tl.constexpr, FIRST_Y: tl.constexpr, FIRST_X: tl.constexpr,
    CELLS_Y: tl.constexpr, CELLS_X: tl.constexpr, BY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the existing pooling cells whose windows contain pixels of any of the blocks (ry, rx).

    Return four numbers: row and column of the first cell, both relative to a block; cells per row; all cells.
    Without BY_BLOCK nearly every program has inner blocks, which need all cells. The numbers are then constants, and
    the threads need no reductions.
    """
    if not BY_BLOCK:
        return FIRST_Y, FIRST_X, CELLS_X, CELLS_Y * CELLS_X
    top = tl.maximum(-tl.max(tl.where(there, ry, 0)), FIRST_Y)
    left = tl.maximum(-tl.max(tl.where(there, rx, 0)), FIRST_X)
    bottom = tl.minimum(PH - tl.min(tl.where(there, ry, PH)), FIRST_Y + CELLS_Y)
    right = tl.minimum(PW - tl.min(tl.where(there, rx, PW)), FIRST_X + CELLS_X)
    across = tl.maximum(right - left, 1)  # at least 1, because the caller divides by it
    return top, left, across, across * tl.maximum(bottom - top, 0)


@triton.jit
def _input_gradient(
    g, route, w, dx, B,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    POOL: tl.constexpr, SIDE: tl.constexpr, FIRST_Y: tl.constexpr, FIRST_X: tl.constexpr,
    CELLS_Y: tl.constexpr, CELLS_X: tl.constexpr, BY_BLOCK: tl.constexpr,
    ROUTED: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the input's gradient. A tile's rows are blocks of SIDE x SIDE pixels; its columns are (pixel, channel).

    All pixels of a block lie in the windows of the same few pooling cells. The gradient of a cell is loaded once. Then,
    for each position in the cell, it is multiplied by the filters between this position and the block's pixels.
    """
    client = tl.program_id(2).to(tl.int64)
    b, ry, rx, there = blocks_of(B, H, W, SIDE, BY_BLOCK, BM)
    top, left, across, cells = cells_of(ry, rx, there, PH, PW, FIRST_Y, FIRST_X, CELLS_Y, CELLS_X, BY_BLOCK)
    n = tl.arange(0, SIDE * SIDE * BN)
    pixel, ci = n // BN, tl.program_id(1) * BN + n % BN
    qy, qx = pixel // SIDE, pixel % SIDE
    g += client * B * PH * PW * CO
    route += client * B * PH * PW * CO
    w += client * (CELLS_Y * CELLS_X * POOL * POOL * SIDE * SIDE * CI * CO)
    BLOCKS: tl.constexpr = (CO + BK - 1) // BK
    total = tl.zeros([BM, SIDE * SIDE * BN], tl.float32)
    for step in range(cells * BLOCKS):
        cy, cx = top + step // BLOCKS // across, left + step // BLOCKS % across
        cell = (cy - FIRST_Y) * CELLS_X + cx - FIRST_X
        co = (step % BLOCKS) * BK + tl.arange(0, BK)
        py, px = ry + cy, rx + cx
        here = there & (py >= 0) & (py < PH) & (px >= 0) & (px < PW)
        out = ((b * PH + py) * PW + px)[:, None] * CO + co[None, :]
        valid = here[:, None] & (co < CO)[None, :]
        d = tl.load(g + out, mask=valid, other=0.0)
        if ROUTED:
            way = tl.load(route + out, mask=valid, other=255).to(tl.int32)
        for place in tl.static_range(POOL * POOL):
            at = ((cell * POOL * POOL + place) * SIDE * SIDE * CI + pixel * CI + ci) * CO
            f = tl.load(w + at[None, :] + co[:, None], mask=(ci < CI)[None, :] & (co < CO)[:, None], other=0.0)
            e = tl.where(way == place, d, 0.0) if ROUTED else d
            total = tl.dot(e, f, total, input_precision=PRECISION)
    store_pixels(dx + client * B * (H * W * CI), total, b, ry, rx, there, qy, qx, ci, H, W, CI, SIDE)


class BlockCells(NamedTuple):
    """The pooling cells whose windows contain a block of input pixels.

    Attributes:
        side: side of a block. It is the step from one cell to the next, so all pixels of a block have the same cells.
        first_y: row of the first cell, relative to the block.
        first_x: column of the first cell, relative to the block.
        cells_y: number of rows of cells.
        cells_x: number of columns of cells.
        by_block: whether a tile's rows are ordered by block: if more than a quarter of the cells do not exist.
    """

    side: int
    first_y: int
    first_x: int
    cells_y: int
    cells_x: int
    by_block: bool


@cache
def block_cells(s: Geometry) -> BlockCells:
    """Return the pooling cells for blocks of a convolution's input."""
    step = s.stride * s.pool
    last = (step - 1 + s.padding) // step
    firsts, numbers, there = [], [], 1.0
    for size, outputs, kernel in ((s.h, s.ph, s.kh), (s.w, s.pw, s.kw)):
        first = (s.padding - kernel + 1) // step
        looks = [block + cell for block in range(triton.cdiv(size, step)) for cell in range(first, last + 1)]
        there *= sum(0 <= cell < outputs for cell in looks) / len(looks)
        firsts.append(first)
        numbers.append(last - first + 1)
    return BlockCells(step, *firsts, *numbers, by_block=there < 0.75)


def input_gradient(g: Tensor, route: Tensor, w: Tensor, geometry: Geometry, precision: str) -> Tensor:
    """Return the gradient of x as [c, b, h, w, ci].

    Args:
        g: gradient of the output, [c, b, ph, pw, co], contiguous.
        route: the route from `forward`.
        w: [c, co, ci, kh, kw], contiguous rows.
        geometry: sizes of the convolution.
        precision: precision of products.
    """
    s = geometry
    clients, samples = g.shape[:2]
    dx = g.new_empty((clients, samples, s.h, s.w, s.ci))
    bm, bn, bk, warps, stages = _input_tile(s, g, precision)
    cells = block_cells(s)
    spread = g.new_empty((clients, cells.cells_y, cells.cells_x, s.pool**2, cells.side**2, s.ci, s.co))
    _spread_back[(triton.cdiv(spread[0].numel(), 1024), clients)](
        w, spread, w.stride(0), s.ci, s.co, s.kh, s.kw, s.stride, s.padding, s.pool, *cells[:5],
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
    rows = samples * triton.cdiv(s.h, cells.side) * triton.cdiv(s.w, cells.side)
    grid = (triton.cdiv(rows, bm), triton.cdiv(s.ci, bn), clients)
    _input_gradient[grid](
        g, route, spread, dx, samples, s.h, s.w, s.ci, s.co, s.ph, s.pw, s.pool, *cells,
        s.routed, precision, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dx


# Sizes of tiles (rows, channels, inner), warps and stages; see `pefll.backend.kernels.convolution`.


def _input_tile(s: Geometry, g: Tensor, precision: str) -> tuple[int, int, int, int, int]:
    step = s.stride * s.pool
    channels = side(s.ci, max(16, 64 // step**2))
    at_once, deep, stages = shrunk(g, 64, side(s.co, 32), step**2 * channels, 2, precision)
    return at_once, channels, deep, 4, stages
