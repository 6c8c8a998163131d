"""The gradient of a convolution's input, with pooling, bias and ReLU and with a client axis, as Triton kernels.

Pixels look back at the pooling cells whose windows they lie in. See `pefll.ops.kernels.convolution` for windows,
positions and routes, and `pefll.ops.kernels.laid` for bfloat16.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from pefll.ops.geometry import Geometry
from pefll.ops.kernels.tiles import shrunk, side


@triton.jit
def _spread_back(
    w, out, sw_c, CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr,
    PAD: tl.constexpr, POOL: tl.constexpr, SIDE: tl.constexpr, FIRST_Y: tl.constexpr, FIRST_X: tl.constexpr,
    CELLS_Y: tl.constexpr, CELLS_X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the filters [co, ci, kh, kw] as [cell, position, pixel of the block, ci, co], zero where none leads."""
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
def cells_of(
    ry, rx, there, PH: tl.constexpr, PW: tl.constexpr, FIRST_Y: tl.constexpr, FIRST_X: tl.constexpr,
    CELLS_Y: tl.constexpr, CELLS_X: tl.constexpr,
):  # fmt: skip
    """Return which pooling cells some of the blocks (ry, rx) look back at, of those that there are.

    As the first one's row and column, relative to a block's own, how many lie side by side, and how many there are.
    """
    top = tl.maximum(-tl.max(tl.where(there, ry, 0)), FIRST_Y)
    left = tl.maximum(-tl.max(tl.where(there, rx, 0)), FIRST_X)
    bottom = tl.minimum(PH - tl.min(tl.where(there, ry, PH)), FIRST_Y + CELLS_Y)
    right = tl.minimum(PW - tl.min(tl.where(there, rx, PW)), FIRST_X + CELLS_X)
    across = tl.maximum(right - left, 1)  # whoever divides by it may do so before it knows whether there are any
    return top, left, across, across * tl.maximum(bottom - top, 0)


@triton.jit
def _input_gradient(
    g, route, w, dx, B,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    POOL: tl.constexpr, SIDE: tl.constexpr, FIRST_Y: tl.constexpr, FIRST_X: tl.constexpr,
    CELLS_Y: tl.constexpr, CELLS_X: tl.constexpr,
    ROUTED: tl.constexpr, PRECISION: tl.constexpr,
    BY_BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A row is a block of SIDE x SIDE input pixels, the columns are (pixel in the block, input channel).

    All pixels of a block look back at the same few pooling cells; each cell's gradient is fetched once, and each of its
    positions is one product with the filters that lead from it to the block's pixels. BY_BLOCK, rows that follow each
    other are the same block of other samples, so that a program of blocks at the border has fewer cells to look at.
    """
    client = tl.program_id(2).to(tl.int64)
    BH: tl.constexpr = (H + SIDE - 1) // SIDE
    BW: tl.constexpr = (W + SIDE - 1) // SIDE
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    if BY_BLOCK:
        b, block = rows % B, rows // B
    else:
        b, block = rows // (BH * BW), rows % (BH * BW)
    ry, rx = block // BW, block % BW
    there = (b < B) & (block < BH * BW)
    top, left, across, cells = cells_of(ry, rx, there, PH, PW, FIRST_Y, FIRST_X, CELLS_Y, CELLS_X)
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
    iy, ix = (ry * SIDE)[:, None] + qy[None, :], (rx * SIDE)[:, None] + qx[None, :]
    out = ((client * B + b[:, None]) * H + iy) * W + ix
    real = there[:, None] & (iy < H) & (ix < W) & (ci < CI)[None, :]
    tl.store(dx + out * CI + ci[None, :], total, mask=real)


@cache
def way_back(s: Geometry) -> tuple[tuple[int, int, int, int, int], bool]:
    """Return how input pixels look back at pooling cells, and whether many would look beyond the border.

    A block of pixels has the side of the step from one cell to the next, so that all its pixels look at the same cells.

    Returns:
        The side of a block, where the cells that it looks at begin, relative to its own, rows and columns of them; and
        whether over a quarter of the cells that blocks look at are not there.
    """
    step = s.stride * s.pool
    first_y, first_x = (s.padding - s.kh + 1) // step, (s.padding - s.kw + 1) // step
    last = (step - 1 + s.padding) // step
    across = (s.h, s.ph, first_y), (s.w, s.pw, first_x)
    shares = []
    for size, outputs, first in across:
        looks = [block + cell for block in range(triton.cdiv(size, step)) for cell in range(first, last + 1)]
        shares.append(sum(0 <= cell < outputs for cell in looks) / len(looks))
    return (step, first_y, first_x, last - first_y + 1, last - first_x + 1), shares[0] * shares[1] < 0.75


def input_gradient(g: Tensor, route: Tensor, w: Tensor, geometry: Geometry, precision: str) -> Tensor:
    """Return the gradient of x as [c, b, h, w, ci].

    Args:
        g: of the output, [c, b, ph, pw, co], contiguous.
        route: from `forward`.
        w: [c, co, ci, kh, kw], each client's contiguous.
        geometry: of the convolution.
        precision: of products.
    """
    s = geometry
    clients, samples = g.shape[:2]
    dx = g.new_empty((clients, samples, s.h, s.w, s.ci))
    bm, bn, bk, warps, stages = _input_tile(s, g, precision)
    way, by_block = way_back(s)
    step, _, _, *cells = way
    spread = g.new_empty((clients, *cells, s.pool**2, step**2, s.ci, s.co))
    _spread_back[(triton.cdiv(spread[0].numel(), 1024), clients)](
        w, spread, w.stride(0), s.ci, s.co, s.kh, s.kw, s.stride, s.padding, s.pool, *way, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    rows = samples * triton.cdiv(s.h, step) * triton.cdiv(s.w, step)
    grid = (triton.cdiv(rows, bm), triton.cdiv(s.ci, bn), clients)
    _input_gradient[grid](
        g, route, spread, dx, samples, s.h, s.w, s.ci, s.co, s.ph, s.pw, s.pool, *way,
        s.routed, precision, BY_BLOCK=by_block, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dx


def _input_tile(s: Geometry, g: Tensor, precision: str) -> tuple[int, int, int, int, int]:
    step = s.stride * s.pool
    channels = side(s.ci, max(16, 64 // step**2))
    at_once, deep, stages = shrunk(g, 64, side(s.co, 32), step**2 * channels, 2, precision)
    return at_once, channels, deep, 4, stages
