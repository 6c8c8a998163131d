"""Triton kernels for the backward pass of a bfloat16 convolution with a client axis. The input is NHWC.

`pefll.backend.kernels.convolution` explains windows, positions, routes and spread weights. The first kernel writes the
*routed* gradients. Every window gets a row, with one gradient for each (position, channel). The gradient is zero unless
that position had the maximum. Weight and input gradients are then plain matrix products of such rows. The next rows are
loaded while the products are computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pefll.backend.geometry import Geometry
from pefll.backend.kernels.conv_input_grad import block_cells, blocks_of, cells_of, store_pixels
from pefll.backend.kernels.convolution import PROGRAMS, corner, pixels, split_sum, vector_width
from pefll.backend.kernels.tiles import shrunk, side


@triton.jit
def _let_through(
    g, route, routed, shares, B, sg_c, sg_b, sg_h, sg_w, sg_k,
    CO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr, ROUTED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write routed gradients as [window, position, co], and this program's partial sum of the bias's gradient."""
    PLACES: tl.constexpr = POOL * POOL
    client = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    b, rest = rows // (PH * PW), rows % (PH * PW)
    g += client * sg_c
    at = b.to(tl.int64) * sg_b + (rest // PW) * sg_h + (rest % PW) * sg_w
    route += client * B * (PH * PW * CO)
    routed += client * B * (PH * PW * PLACES * CO)
    shares += (client * tl.num_programs(0) + tl.program_id(0)) * CO
    for first in range(0, CO, BN):
        co = first + tl.arange(0, BN)
        valid = (b < B)[:, None] & (co < CO)[None, :]
        d = tl.load(g + at[:, None] + co[None, :] * sg_k, mask=valid, other=0.0)
        if ROUTED:
            way = tl.load(route + rows[:, None] * CO + co[None, :], mask=valid, other=255).to(tl.int32)
            for place in tl.static_range(PLACES):
                won = tl.where(way == place, d, 0.0)
                tl.store(routed + (rows * PLACES + place)[:, None] * CO + co[None, :], won, mask=valid)
            d = tl.where(way < PLACES, d, 0.0)
        else:
            tl.store(routed + rows[:, None] * CO + co[None, :], d, mask=valid)
        tl.store(shares + co, tl.sum(d.to(tl.float32), axis=0), mask=co < CO)


@triton.jit
def _weight_gradient(
    routed, x, partial, B, C, ROWS: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr,
    VECTOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, N_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write this program's partial sum of the gradient of the spread weights, [(position, co), window]."""
    N: tl.constexpr = POOL * POOL * CO
    K: tl.constexpr = WH * WW * CI
    k = (tl.program_id(0) // N_BLOCKS) * BK + tl.arange(0, BK)
    n = (tl.program_id(0) % N_BLOCKS) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    client = tl.program_id(2).to(tl.int64)
    wy, wx, offset = pixels(k, W * CI, CI, 1, CI, WW, PAD, VECTOR)
    x += client * B * (H * W * CI)
    routed += client * B * (PH * PW * N)
    total = tl.zeros([BN, BK], tl.float32)
    for row in range(0, ROWS, BM):
        rows = split * ROWS + row + tl.arange(0, BM)
        b, iy, ix = corner(rows, PH, PW, POOL * STRIDE, PAD)
        start = tl.multiple_of((b * H + iy) * (W * CI) + ix * CI, VECTOR)
        inside = (b < B)[:, None] & (k < K)[None, :]
        if PAD > 0:
            jy, jx = iy[:, None] + wy[None, :], ix[:, None] + wx[None, :]
            inside &= (jy >= 0) & (jy < H) & (jx >= 0) & (jx < W)
        a = tl.load(x + start[:, None] + offset[None, :], mask=inside, other=0.0)
        d = tl.load(routed + rows[:, None] * N + n[None, :], mask=(b < B)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(tl.trans(d), a, total)
    partial += (split.to(tl.int64) * C + client) * (N * K)
    tl.store(partial + n[:, None] * K + k[None, :], total, mask=(n < N)[:, None] & (k < K)[None, :])


@triton.jit
def _gather_up(
    partial, shares, dw, db, C, SPLITS: tl.constexpr, SHARES: tl.constexpr, CI: tl.constexpr, LAID: tl.constexpr,
    CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    POOL: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, BIAS_BLOCK: tl.constexpr,
    BIAS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add partial sums, and positions that share a weight, to the gradients [co, ci, kh, kw] and [co]."""
    client = tl.program_id(1).to(tl.int64)
    K: tl.constexpr = WH * WW * LAID
    WEIGHTS: tl.constexpr = CO * KH * KW * CI
    BLOCKS: tl.constexpr = (WEIGHTS + BLOCK - 1) // BLOCK
    if tl.program_id(0) < BLOCKS:
        total = tl.zeros([BLOCK], tl.float32)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        co, k = at // (KH * KW * CI), at % (KH * KW * CI)
        ky, kx, ci = k // (KW * CI), (k // CI) % KW, k % CI  # neighbouring threads read neighbouring numbers
        for first in range(0, SPLITS, AT_ONCE):
            split = first + tl.arange(0, AT_ONCE)
            share = partial + (split * C + client) * (POOL * POOL * CO * K)
            there = (split < SPLITS)[:, None] & (at < WEIGHTS)[None, :]
            for place in tl.static_range(POOL * POOL):
                wy, wx = ky + (place // POOL) * STRIDE, kx + (place % POOL) * STRIDE
                from_ = (place * CO + co) * K + (wy * WW + wx) * LAID + ci
                here = tl.load(share[:, None] + from_[None, :], mask=there, other=0.0, eviction_policy="evict_first")
                total += tl.sum(here, axis=0)
        tl.store(dw + client * WEIGHTS + ((co * CI + ci) * KH + ky) * KW + kx, total, mask=at < WEIGHTS)
    else:
        channel = (tl.program_id(0) - BLOCKS) * BIAS_BLOCK + tl.arange(0, BIAS_BLOCK)
        of_bias = tl.zeros([BIAS_BLOCK], tl.float32)
        for first in range(0, SHARES, BIAS_AT_ONCE):
            share = first + tl.arange(0, BIAS_AT_ONCE)
            there = (share < SHARES)[:, None] & (channel < CO)[None, :]
            place = (client * SHARES + share)[:, None] * CO + channel[None, :]
            of_bias += tl.sum(tl.load(shares + place, mask=there, other=0.0), axis=0)
        tl.store(db + client * CO + channel, of_bias, mask=channel < CO)


@triton.jit
def _input_gradient(
    routed, w, dx, B,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, LAID: tl.constexpr, CO: tl.constexpr, WH: tl.constexpr,
    WW: tl.constexpr, PAD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr, SIDE: tl.constexpr,
    FIRST_Y: tl.constexpr, FIRST_X: tl.constexpr, CELLS_Y: tl.constexpr, CELLS_X: tl.constexpr,
    BY_BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the input's gradient. A tile's rows are blocks of SIDE x SIDE pixels; its columns are (pixel, channel).

    All pixels of a block lie in the windows of the same few pooling cells. A pixel has one position in each window. So
    the spread weights of the forward pass have the pixel's weights.
    """
    client = tl.program_id(2).to(tl.int64)
    N: tl.constexpr = POOL * POOL * CO
    K: tl.constexpr = WH * WW * LAID
    BLOCKS: tl.constexpr = (N + BK - 1) // BK
    b, ry, rx, there = blocks_of(B, H, W, SIDE, BY_BLOCK, BM)
    top, left, across, cells = cells_of(ry, rx, there, PH, PW, FIRST_Y, FIRST_X, CELLS_Y, CELLS_X, BY_BLOCK)
    column = tl.arange(0, SIDE * SIDE * BN)
    pixel, ci = column // BN, tl.program_id(1) * BN + column % BN
    qy, qx = pixel // SIDE, pixel % SIDE
    routed += client * B * (PH * PW * N)
    w += client * (N * K)
    total = tl.zeros([BM, SIDE * SIDE * BN], tl.float32)
    for step in range(cells * BLOCKS):
        n = (step % BLOCKS) * BK + tl.arange(0, BK)
        cy, cx = top + step // BLOCKS // across, left + step // BLOCKS % across
        py, px = ry + cy, rx + cx
        here = there & (py >= 0) & (py < PH) & (px >= 0) & (px < PW)
        at = ((b * PH + py) * PW + px)[:, None] * N + n[None, :]
        d = tl.load(routed + at, mask=here[:, None] & (n < N)[None, :], other=0.0)
        wy, wx = qy + PAD - cy * SIDE, qx + PAD - cx * SIDE
        looks = (wy >= 0) & (wy < WH) & (wx >= 0) & (wx < WW) & (ci < CI)
        at = n[:, None] * K + ((wy * WW + wx) * LAID + ci)[None, :]
        f = tl.load(w + at, mask=(n < N)[:, None] & looks[None, :], other=0.0)
        total = tl.dot(d, f, total)
    store_pixels(dx + client * B * (H * W * CI), total, b, ry, rx, there, qy, qx, ci, H, W, CI, SIDE)


def routed_gradient(g: Tensor, route: Tensor, nhwc: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return routed gradients, [c, rows, position * co], and partial sums of the bias's gradient, [c, shares, co].

    Args:
        g: gradient of the output, [c, b, co, ph, pw], in any layout, float32 or bfloat16. The bias's gradient is a
            float32 sum of these numbers. Products round them to bfloat16.
        route: the route from `forward`, contiguous.
        nhwc: the input, [c, b, h, w, channels]. The routed gradients get its type.
        geometry: sizes of the convolution.
    """
    s = geometry
    clients, samples = g.shape[:2]
    rows = samples * s.ph * s.pw
    # Blocks are small if there are too few rows to keep every multiprocessor busy.
    bm = 128 if clients * rows > 128 * PROGRAMS else 32
    blocks = triton.cdiv(rows, bm)
    routed = nhwc.new_empty((clients, rows, s.pool**2 * s.co))
    shares = g.new_empty((clients, blocks, s.co), dtype=torch.float32)
    client, sample, channel, row, column = g.stride()
    _let_through[(blocks, clients)](
        g, route, routed, shares, samples, client, sample, row, column, channel, s.co, s.ph, s.pw, s.pool, s.routed,
        BM=bm, BN=side(s.co, 32), num_warps=4,
    )  # fmt: skip
    return routed, shares


def weight_gradient(routed: Tensor, shares: Tensor, nhwc: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return the gradients of weights [c, co, ci, kh, kw] and bias [c, co].

    Args:
        routed: routed gradients, from `routed_gradient`.
        shares: partial sums, from `routed_gradient`.
        nhwc: the input, [c, b, h, w, channels], contiguous.
        geometry: sizes of the convolution.
    """
    clients, samples, _, _, channels = nhwc.shape
    s = geometry._replace(ci=channels)
    columns, window = s.pool**2 * s.co, s.wh * s.ww * channels
    bm, bn, bk, warps, stages = _weight_tile(columns, window, nhwc)
    n_blocks = triton.cdiv(columns, bn)
    blocks = n_blocks * triton.cdiv(window, bk)
    # A tile of 128 columns is as much work as two of 64.
    programs = blocks * max(1, bn // 64) * clients
    splits, each = split_sum(triton.cdiv(routed.shape[1], bm), programs, s.pool)
    partial = shares.new_empty((splits, clients, columns, window))
    dw = shares.new_empty((clients, s.co, geometry.ci, s.kh, s.kw))
    db = shares.new_empty((clients, s.co))
    _weight_gradient[(blocks, splits, clients)](
        routed, nhwc, partial, samples, clients, each * bm, s.h, s.w, s.ci, s.co, s.wh, s.ww, s.stride, s.padding, s.ph,
        s.pw, s.pool, vector_width(nhwc.permute(0, 1, 4, 2, 3), s), BM=bm, BN=bn, BK=bk, N_BLOCKS=n_blocks,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    at_once, bias_at_once = (min(64, triton.next_power_of_2(number)) for number in (splits, shares.shape[1]))
    block, bias_block = max(16, 512 // at_once), max(16, 512 // bias_at_once)
    grid = (triton.cdiv(dw[0].numel(), block) + triton.cdiv(s.co, bias_block), clients)
    _gather_up[grid](
        partial, shares, dw, db, clients, splits, shares.shape[1], geometry.ci, channels, s.co, s.kh, s.kw, s.stride,
        s.wh, s.ww, s.pool, BLOCK=block, AT_ONCE=at_once, BIAS_BLOCK=bias_block, BIAS_AT_ONCE=bias_at_once, num_warps=4,
    )  # fmt: skip
    return dw, db


def input_gradient(
    routed: Tensor, spread: Tensor, nhwc: Tensor, geometry: Geometry, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the gradient of x as [c, b, h, w, ci].

    Args:
        routed: routed gradients, from `routed_gradient`.
        spread: the spread weights from `forward`, contiguous.
        nhwc: the input, [c, b, h, w, channels].
        geometry: sizes of the convolution.
        dtype: type of x and of its gradient.
    """
    s = geometry
    clients, samples = nhwc.shape[:2]
    cells = block_cells(s)
    dx = routed.new_empty((clients, samples, s.h, s.w, s.ci), dtype=dtype)
    rows = samples * triton.cdiv(s.h, cells.side) * triton.cdiv(s.w, cells.side)
    bm, bn, bk, warps, stages = _input_tile(s, routed, rows)
    grid = (triton.cdiv(rows, bm), triton.cdiv(s.ci, bn), clients)
    _input_gradient[grid](
        routed, spread, dx, samples, s.h, s.w, s.ci, nhwc.shape[4], s.co, s.wh, s.ww, s.padding, s.ph, s.pw, s.pool,
        *cells, BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dx


# Sizes of tiles (rows, columns, inner), warps and stages; see `pefll.backend.kernels.convolution`.


def _weight_tile(columns: int, window: int, nhwc: Tensor) -> tuple[int, int, int, int, int]:
    bn, deep = side(columns, 128), side(window, 64)
    deep, at_once, stages = shrunk(nhwc, deep, 64, bn, 3, "bf16")
    return at_once, bn, deep, 4, stages


def _input_tile(s: Geometry, routed: Tensor, rows: int) -> tuple[int, int, int, int, int]:
    step = s.stride * s.pool
    channels = side(s.ci, max(16, 64 // step**2))
    # The number of rows of a program changes no sum, so it may depend on the total number of clients of all runs.
    most = 128 if len(routed) * rows > 4 * 128 * PROGRAMS else 64
    at_once, deep, stages = shrunk(routed, most, side(routed.shape[2], 64), step**2 * channels, 3, "bf16")
    return at_once, channels, deep, 4, stages
