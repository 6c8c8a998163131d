"""Triton kernels for convolution, max-pooling, bias and ReLU with a client axis, forward and backward.

Channels are innermost in memory. A pooled output is the maximum of a *cell* of convolution positions. It depends on one
*window* of the input: all pixels that any position of the cell reads. A row of a tile is a window, so a pixel is loaded
once per window, not once per position. The columns of a tile are (position in the cell, output channel). The filter of
a column covers the whole window, and is zero at pixels that the position does not read. These filters are the *spread*
weights. Multiplying by their zeros on tensor cores is faster than loading the pixels again for each position.

For bfloat16 products the input is first copied: rounded, NHWC, and with four channels instead of three. Most windows
then start at multiples of 16 bytes. No copy is made if the previous convolution wrote bfloat16 in NHWC.

The *route* is one byte per output: the position in the cell that had the maximum, or 255 if ReLU gave zero. The values
before pooling are never written to memory.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pefll.backend.geometry import Geometry
from pefll.backend.kernels.tiles import shrunk, side

PROGRAMS = 132  # smallest number of partial sums over all pictures: one for each multiprocessor of an H200


@triton.jit
def _spread(
    w, out, block, CI: tl.constexpr, LAID: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one client's filters [co, ci, kh, kw] as spread weights [position, co, (wy, wx, LAID channels)]."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    K: tl.constexpr = WH * WW * LAID
    SIZE: tl.constexpr = POOL * POOL * CO * K
    k, co, place = at % K, (at // K) % CO, at // (K * CO)
    ky = k // (WW * LAID) - (place // POOL) * STRIDE
    kx = (k // LAID) % WW - (place % POOL) * STRIDE
    ci = k % LAID
    looks = (at < SIZE) & (ky >= 0) & (ky < KH) & (kx >= 0) & (kx < KW) & (ci < CI)
    value = tl.load(w + ((co * CI + ci) * KH + ky) * KW + kx, mask=looks, other=0.0)
    tl.store(out + at, value, mask=at < SIZE)


@triton.jit
def _lay(
    x, out, block, B, sx_b, sx_h, sx_w, sx_k, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, LAID: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one client's pictures as [b, h, w, LAID]; additional channels are zero."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    ci, pixel = at % LAID, at // LAID
    b, row, column = pixel // (H * W), (pixel // W) % H, pixel % W
    there = b < B
    value = tl.load(x + b * sx_b + row * sx_h + column * sx_w + ci * sx_k, mask=there & (ci < CI), other=0.0)
    tl.store(out + at, value, mask=there)


@triton.jit
def _prepare(
    w, spread, x, laid, B, sw_c, sx_c, sx_b, sx_h, sx_w, sx_k, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr,
    LAID: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, POOL: tl.constexpr, SPREAD_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first programs write the spread weights; the others, if any, copy the pictures."""
    client = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    if block < SPREAD_BLOCKS:
        spread += client * (POOL * POOL * CO * WH * WW * LAID)
        _spread(w + client * sw_c, spread, block, CI, LAID, CO, KH, KW, STRIDE, WH, WW, POOL, BLOCK)
    else:
        laid += client * B * (H * W * LAID)
        _lay(x + client * sx_c, laid, block - SPREAD_BLOCKS, B, sx_b, sx_h, sx_w, sx_k, H, W, CI, LAID, BLOCK)


@triton.jit
def pixels(k, sx_h, sx_w, sx_k, CI: tl.constexpr, WW: tl.constexpr, PAD: tl.constexpr, VECTOR: tl.constexpr):
    """Return the row and column in the window, and the offset in x, of elements k = (wy, wx, ci)."""
    wy = k // (WW * CI)
    wx = (k // CI) % WW
    offset = wy * sx_h + wx * sx_w + (k % CI) * sx_k
    if VECTOR > 1:  # see `vector_width`
        if PAD > 0:  # then a vector of numbers is within one pixel
            wy = tl.max_constancy(wy, VECTOR)
            wx = tl.max_constancy(wx, VECTOR)
        offset = tl.max_contiguous(tl.multiple_of(offset, VECTOR), VECTOR)
    return wy, wx, offset


@triton.jit
def corner(rows, PH: tl.constexpr, PW: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr):
    """Return the sample of each output in `rows`, and the first row and column of its window."""
    b = rows // (PH * PW)
    rest = rows % (PH * PW)
    return b, (rest // PW) * STEP - PAD, (rest % PW) * STEP - PAD


@triton.jit
def _forward(
    x, w, bias, y, route, B, sx_c, sx_b, sx_h, sx_w, sx_k, sb_c,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr,
    RELU: tl.constexpr, BIAS: tl.constexpr, CHANNELS_FIRST: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    PLACES: tl.constexpr = POOL * POOL
    client = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, PLACES * BN)
    place, channel = n // BN, tl.program_id(1) * BN + n % BN
    b, iy, ix = corner(rows, PH, PW, POOL * STRIDE, PAD)
    start = tl.multiple_of(b * sx_b + iy * sx_h + ix * sx_w, VECTOR)
    K: tl.constexpr = WH * WW * CI
    x += client * sx_c
    w += client * (POOL * POOL * CO * K)
    column = (place * CO + channel) * K
    real = channel < CO
    total = tl.zeros([BM, PLACES * BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        wy, wx, offset = pixels(k, sx_h, sx_w, sx_k, CI, WW, PAD, VECTOR)
        inside = (b < B)[:, None] & (k < K)[None, :]
        if PAD > 0:
            jy, jx = iy[:, None] + wy[None, :], ix[:, None] + wx[None, :]
            inside &= (jy >= 0) & (jy < H) & (jx >= 0) & (jx < W)
        a = tl.load(x + start[:, None] + offset[None, :], mask=inside, other=0.0)
        f = tl.load(w + column[None, :] + k[:, None], mask=(k < K)[:, None] & real[None, :], other=0.0)
        total = tl.dot(a, f, total, input_precision=PRECISION)
    co = tl.program_id(1) * BN + tl.arange(0, BN)
    if PLACES > 1:
        cells = tl.reshape(total, [BM, PLACES, BN])
        value = tl.max(cells, axis=1)
        winner = tl.argmax(cells, axis=1)
    else:
        value = total
        winner = tl.zeros([BM, BN], tl.int32)
    if BIAS:
        value += tl.load(bias + client * sb_c + co, mask=co < CO, other=0.0)[None, :]
    if RELU:
        winner = tl.where(value <= 0, 255, winner)
        value = tl.where(value <= 0, 0.0, value)  # `tl.maximum` would drop NaN
    inside = (rows < B * PH * PW)[:, None] & (co < CO)[None, :]
    out = (client * B * PH * PW + rows)[:, None] * CO + co[None, :]
    if CHANNELS_FIRST:
        picture = (client * B + b) * (PH * PW * CO) + rows % (PH * PW)
        tl.store(y + picture[:, None] + co[None, :] * (PH * PW), value, mask=inside)
    else:
        tl.store(y + out, value, mask=inside)
    if RELU or PLACES > 1:
        tl.store(route + out, winner.to(tl.uint8), mask=inside)


@triton.jit
def _weight_gradient(
    x, g, route, partial, B, C, sx_c, sx_b, sx_h, sx_w, sx_k, ROWS: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr,
    ROUTED: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CO_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write this program's partial sum of the gradient of the spread weights.

    Every window gets one more element at its end, which is 1. The row of that element is the gradient of the bias.
    """
    PLACES: tl.constexpr = POOL * POOL
    k = (tl.program_id(0) // CO_BLOCKS) * BK + tl.arange(0, BK)
    first = (tl.program_id(0) % CO_BLOCKS) * BN
    co = first + tl.arange(0, BN)
    n = tl.arange(0, PLACES * BN)
    place, channel = n // BN, first + n % BN
    split = tl.program_id(1)
    client = tl.program_id(2).to(tl.int64)
    K: tl.constexpr = WH * WW * CI
    wy, wx, offset = pixels(k, sx_h, sx_w, sx_k, CI, WW, PAD, VECTOR)
    x += client * sx_c
    g += client * B * PH * PW * CO
    route += client * B * PH * PW * CO
    total = tl.zeros([BK, PLACES * BN], tl.float32)
    for row in range(0, ROWS, BM):
        rows = split * ROWS + row + tl.arange(0, BM)
        b, iy, ix = corner(rows, PH, PW, POOL * STRIDE, PAD)
        start = tl.multiple_of(b * sx_b + iy * sx_h + ix * sx_w, VECTOR)
        inside = (b < B)[:, None] & (k < K)[None, :]
        if PAD > 0:
            jy, jx = iy[:, None] + wy[None, :], ix[:, None] + wx[None, :]
            inside &= (jy >= 0) & (jy < H) & (jx >= 0) & (jx < W)
        a = tl.load(x + start[:, None] + offset[None, :], mask=inside, other=0.0)
        a = tl.trans(tl.where((k == K)[None, :], 1.0, a))
        out = rows[:, None] * CO + co[None, :]
        valid = (b < B)[:, None] & (co < CO)[None, :]
        d = tl.load(g + out, mask=valid, other=0.0)
        if ROUTED:
            # The column of a position has the gradient if that position had the maximum of its cell.
            way = tl.load(route + out, mask=valid, other=255).to(tl.int32)
            won = way[:, None, :] == tl.arange(0, PLACES)[None, :, None]
            d = tl.reshape(tl.where(won, d[:, None, :], 0.0), [BM, PLACES * BN])
        total = tl.dot(a, d, total, input_precision=PRECISION)
    partial += (split.to(tl.int64) * C + client) * ((K + 1) * POOL * POOL * CO)
    at = k[:, None] * (POOL * POOL * CO) + (place * CO + channel)[None, :]
    real = channel < CO
    tl.store(partial + at, total, mask=(k <= K)[:, None] & real[None, :])


@triton.jit
def _gather_up(
    partial, dw, db, C, SPLITS: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add partial sums, and positions that share a weight, to the gradients [co, ci, kh, kw] and [co]."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    co, k = at % CO, at // CO  # neighbouring threads read neighbouring numbers
    ky, kx, ci = k // (KW * CI), (k // CI) % KW, k % CI
    is_weight, is_bias = k < KH * KW * CI, k == KH * KW * CI
    K: tl.constexpr = WH * WW * CI
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, SPLITS, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        share = partial + (split * C + client) * ((K + 1) * POOL * POOL * CO)
        there = (split < SPLITS)[:, None] & (is_weight | is_bias)[None, :]
        for place in tl.static_range(POOL * POOL):
            wy, wx = ky + (place // POOL) * STRIDE, kx + (place % POOL) * STRIDE
            row = tl.where(is_bias, K, (wy * WW + wx) * CI + ci)
            at = (row * POOL * POOL + place) * CO + co
            here = tl.load(share[:, None] + at[None, :], mask=there, other=0.0, eviction_policy="evict_first")
            total += tl.sum(here, axis=0)
    tl.store(dw + client * (KH * KW * CI * CO) + ((co * CI + ci) * KH + ky) * KW + kx, total, mask=is_weight)
    tl.store(db + client * CO + co, total, mask=is_bias)


class Forward(NamedTuple):
    """The outputs of a convolution, and tensors for its backward pass.

    Attributes:
        y: outputs, float32 or bfloat16 [c, b, co, ph, pw].
        route: position of the maximum, uint8 [c, b, ph, pw, co]; [c, 1] without pooling and ReLU.
        nhwc: the copy of the input, [c, b, h, w, channels]; [c, 0] if there is no copy.
        spread: the spread weights, [c, position, co, window]; [c, 0] unless bfloat16.
    """

    y: Tensor
    route: Tensor
    nhwc: Tensor
    spread: Tensor


def forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    precision: str,
    channels_first: bool = False,
    bf16_out: bool = False,
) -> Forward:
    """Return outputs, and tensors for the backward pass.

    Args:
        x: [c, b, ci, h, w], in any layout, float32. If `precision` is bf16, it may be bfloat16, which is not copied.
        w: [c, co, ci, kh, kw], contiguous rows.
        bias: [c, co], or None.
        geometry: sizes of the convolution.
        precision: precision of products: tf32x3, tf32 or bf16.
        channels_first: whether channels are outermost in the outputs' memory; by default they are innermost.
        bf16_out: whether outputs are rounded to bfloat16.
    """
    s = geometry
    clients, samples = x.shape[:2]
    lays = precision == "bf16" and x.dtype != torch.bfloat16
    channels = padded_channels(s.ci) if lays else s.ci
    nhwc = x.new_empty(
        (clients, samples, s.h, s.w, channels) if lays else (clients, 0), dtype=factor_type(x, precision)
    )
    spread = x.new_empty((clients, s.pool**2, s.co, s.wh * s.ww * channels), dtype=nhwc.dtype)
    blocks = triton.cdiv(spread[0].numel(), 1024)
    _prepare[(blocks + triton.cdiv(nhwc[0].numel(), 1024), clients)](
        w, spread, x, nhwc, samples, w.stride(0), *_strides(x), s.h, s.w, s.ci, channels, s.co, s.kh, s.kw, s.stride,
        s.wh, s.ww, s.pool, SPREAD_BLOCKS=blocks, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    if lays:
        x, s = nhwc.permute(0, 1, 4, 2, 3), s._replace(ci=channels)
    last, first = (clients, samples, s.ph, s.pw, s.co), (clients, samples, s.co, s.ph, s.pw)
    written = torch.bfloat16 if bf16_out else torch.float32
    y = torch.empty(first if channels_first else last, dtype=written, device=x.device)
    route = torch.empty(last if s.routed else (clients, 1), dtype=torch.uint8, device=x.device)
    rows = samples * s.ph * s.pw
    bm, bn, bk, warps, stages = _forward_tile(s, x, precision)
    grid = (triton.cdiv(rows, bm), triton.cdiv(s.co, bn), clients)
    _forward[grid](
        x, spread, y if bias is None else bias, y, route, samples, *_strides(x),
        0 if bias is None else bias.stride(0), s.h, s.w, s.ci, s.co, s.wh, s.ww, s.stride, s.padding, s.ph, s.pw,
        s.pool, s.relu, bias is not None, channels_first, vector_width(x, s), _triton_precision(precision),
        BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    # Autograd stores the spread weights until the backward pass. So return them only if the backward pass reads them.
    if not channels_first:
        y = y.permute(0, 1, 4, 2, 3)
    return Forward(y, route, nhwc, spread if precision == "bf16" else spread.new_empty((clients, 0)))


def weight_gradient(g: Tensor, route: Tensor, x: Tensor, geometry: Geometry, precision: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of weights [c, co, ci, kh, kw] and bias [c, co].

    Args:
        g: gradient of the output, [c, b, ph, pw, co], contiguous.
        route: the route from `forward`.
        x: [c, b, ci, h, w], in any layout.
        geometry: sizes of the convolution.
        precision: precision of products: tf32x3 or tf32.
    """
    s = geometry
    clients, samples = x.shape[:2]
    window, rows = s.wh * s.ww * s.ci, samples * s.ph * s.pw
    bm, bn, bk, warps = _weight_tile(s, x, precision)
    blocks = triton.cdiv(window + 1, bk) * triton.cdiv(s.co, bn)
    splits, each = split_sum(triton.cdiv(rows, bm), blocks * clients, s.pool)
    partial = x.new_empty((splits, clients, window + 1, s.pool**2 * s.co))
    dw = x.new_empty((clients, s.co, s.ci, s.kh, s.kw))
    db = x.new_empty((clients, s.co))
    _weight_gradient[(blocks, splits, clients)](
        x, g, route, partial, samples, clients, *_strides(x), each * bm,
        s.h, s.w, s.ci, s.co, s.wh, s.ww, s.stride, s.padding, s.ph, s.pw, s.pool, s.routed,
        vector_width(x, s), precision, BM=bm, BN=bn, BK=bk, CO_BLOCKS=triton.cdiv(s.co, bn),
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    at_once = min(64, triton.next_power_of_2(splits))
    block = max(16, 512 // at_once)
    grid = (triton.cdiv((s.kh * s.kw * s.ci + 1) * s.co, block), clients)
    _gather_up[grid](
        partial, dw, db, clients, splits, s.ci, s.co, s.kh, s.kw, s.stride, s.wh, s.ww, s.pool, BLOCK=block,
        AT_ONCE=at_once, num_warps=4,
    )  # fmt: skip
    return dw, db


def split_sum(chunks: int, programs: int, pool: int) -> tuple[int, int]:
    """Split a sum over chunks into enough partial sums to fill a GPU. Return their number, and the chunks of each.

    Without pooling, pictures are large and products small. Each multiprocessor then gets two programs, so that one
    multiplies while the other waits for memory.

    Args:
        chunks: number of chunks of rows; each chunk is one product.
        programs: number of programs if the sum is not split.
        pool: side of the pooling windows.
    """
    wanted = PROGRAMS if pool > 1 else 2 * PROGRAMS
    splits = max(1, min(chunks, triton.cdiv(wanted, programs)))
    each = triton.cdiv(chunks, splits)
    return triton.cdiv(chunks, each), each


# Sizes of tiles (rows, channels, inner), warps and stages. These were the fastest on an H200 for the paper's LeNet with
# 5 and with 50 clients. On GPUs with less shared memory they are smaller, which changes results only by rounding. The
# number of clients in one run decides how the sum of a weight gradient is split. Other runs do not matter.


def _forward_tile(s: Geometry, x: Tensor, precision: str) -> tuple[int, int, int, int, int]:
    clients, rows = len(x), x.shape[1] * s.ph * s.pw
    inner = s.wh * s.ww * s.ci
    if precision == "bf16":
        small = inner <= 256
        channels = side(s.co, max(16, (64 if small else 128) // s.pool**2))
        deep = max(16, gcd(inner, 64))  # if possible, no tile reaches beyond the window
        at_once, deep, stages = shrunk(
            x, 128 if small else 64, deep, s.pool**2 * channels, 2 if small else 3, precision
        )
        return at_once, channels, deep, 4, stages
    at_once = 128 if inner <= 128 or clients * rows >= 128 * 264 else 64
    channels = side(s.co, max(16, 64 // s.pool**2))
    deep, stages = (side(inner, 128), 1) if inner <= 128 else (32, 3)
    at_once, deep, stages = shrunk(x, at_once, deep, s.pool**2 * channels, stages, precision)
    return at_once, channels, deep, 4, stages


def _weight_tile(s: Geometry, x: Tensor, precision: str) -> tuple[int, int, int, int]:
    channels = side(s.co, max(16, 64 // s.pool**2))
    deep = side(s.wh * s.ww * s.ci + 1, 128)
    deep, at_once, _ = shrunk(x, deep, 32, s.pool**2 * channels, 1, precision)
    return at_once, channels, deep, 4


def padded_channels(channels: int) -> int:
    """Return the number of channels of the NHWC copy: one more if that is a multiple of four."""
    return channels + 1 if channels % 4 == 3 else channels


def factor_type(like: Tensor, precision: str) -> torch.dtype:
    """Return the type of factors. Triton's interpreter has no bfloat16, so it uses float32."""
    return torch.bfloat16 if precision == "bf16" and like.is_cuda else torch.float32


def _triton_precision(precision: str) -> str:
    """Return Triton's name for the precision of float32 factors. Triton ignores it for other types."""
    return "tf32" if precision == "bf16" else precision


def _strides(x: Tensor) -> tuple[int, int, int, int, int]:
    """Return the strides of client, sample, row, column and channel of x [c, b, ci, h, w]."""
    client, sample, channel, row, column = x.stride()
    return client, sample, row, column, channel


def vector_width(x: Tensor, s: Geometry) -> int:
    """Return how many numbers of a window one load can fetch. They must be neighbours in memory, and aligned.

    Such a group of numbers may span two pixels of a row, unless there is padding.
    """
    client, sample, channel, row, column = x.stride()
    if channel != 1 or column != s.ci:
        return 1
    starts = (client, sample, row, s.pool * s.stride * s.ci, s.ww * s.ci, s.ci if s.padding else 0)
    for group in (16 // x.element_size(), 4, 2):
        if all(start % group == 0 for start in starts) and x.data_ptr() % (x.element_size() * group) == 0:
            return group
    return 1
