"""Triton kernels for the time steps of an LSTM layer with a client axis, forward and backward.

A program computes all four gates of a block of hidden units, for a block of samples of one client. It needs the states
of all hidden units at the time step before, so each time step is a launch. If all programs fit on the card at the same
time, one launch does all time steps; see `pefll.backend.kernels.lstm_sequence`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pefll.backend.kernels import lstm_sequence
from pefll.backend.kernels.tiles import processors, shared_memory, side

# Whether one launch does all time steps, if all programs fit on the card at the same time.
persistent = True


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit(do_not_specialize=["t"])
def _forward(
    products, w, bias_1, bias_2, gates, memories, states, factors, t, B, T, sw_c, s1_c, s2_c,
    H: tl.constexpr, KEEPS: tl.constexpr, COPIES: tl.constexpr, PRECISION: tl.constexpr,
    BB: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute time step t. `factors` are the states again, in the type of factors.

    Gates and memories of all time steps are stored for a backward pass, or (without KEEPS) the last memory alone.
    """
    client = tl.program_id(2).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    o = tl.program_id(0) * BH + tl.arange(0, BH)
    inside = (b < B)[:, None] & (o < H)[None, :]
    place = b[:, None] * H + o[None, :]  # of a number per sample and unit
    place_4 = b[:, None] * (4 * H) + o[None, :]  # of one of the first gate; the next gate is H further
    states += client * T * B * H
    factors += client * T * B * H
    memories += client * (T if KEEPS else 1) * B * H
    products += client * T * B * (4 * H)
    gates += client * T * B * (4 * H)
    w += client * sw_c
    bias_1 += client * s1_c + o
    bias_2 += client * s2_c + o
    bias_i = tl.load(bias_1, mask=o < H, other=0.0) + tl.load(bias_2, mask=o < H, other=0.0)
    bias_f = tl.load(bias_1 + H, mask=o < H, other=0.0) + tl.load(bias_2 + H, mask=o < H, other=0.0)
    bias_n = tl.load(bias_1 + 2 * H, mask=o < H, other=0.0) + tl.load(bias_2 + 2 * H, mask=o < H, other=0.0)
    bias_o = tl.load(bias_1 + 3 * H, mask=o < H, other=0.0) + tl.load(bias_2 + 3 * H, mask=o < H, other=0.0)
    known = memories + ((t - 1) * B * H if KEEPS else 0) + place
    memory = tl.load(known, mask=inside & (t > 0), other=0.0)
    let_in = tl.zeros([BB, BH], tl.float32)
    forget = tl.zeros([BB, BH], tl.float32)
    new = tl.zeros([BB, BH], tl.float32)
    let_out = tl.zeros([BB, BH], tl.float32)
    for k0 in range(0, H, BK):
        k = k0 + tl.arange(0, BK)
        before = factors + (t - 1) * B * H + b[:, None] * H + k[None, :]
        a = tl.load(before, mask=(b < B)[:, None] & (k < H)[None, :] & (t > 0), other=0.0)
        weight = w + o[None, :] * H + k[:, None]
        valid = (o < H)[None, :] & (k < H)[:, None]
        f = tl.load(weight, mask=valid, other=0.0)
        let_in = tl.dot(a, f, let_in, input_precision=PRECISION)
        f = tl.load(weight + H * H, mask=valid, other=0.0)
        forget = tl.dot(a, f, forget, input_precision=PRECISION)
        f = tl.load(weight + 2 * H * H, mask=valid, other=0.0)
        new = tl.dot(a, f, new, input_precision=PRECISION)
        f = tl.load(weight + 3 * H * H, mask=valid, other=0.0)
        let_out = tl.dot(a, f, let_out, input_precision=PRECISION)
    product = products + t * B * (4 * H) + place_4
    let_in = tl.sigmoid(let_in + tl.load(product, mask=inside, other=0.0) + bias_i[None, :])
    forget = tl.sigmoid(forget + tl.load(product + H, mask=inside, other=0.0) + bias_f[None, :])
    new = _tanh(new + tl.load(product + 2 * H, mask=inside, other=0.0) + bias_n[None, :])
    let_out = tl.sigmoid(let_out + tl.load(product + 3 * H, mask=inside, other=0.0) + bias_o[None, :])
    memory = forget * memory + let_in * new
    state = let_out * _tanh(memory)
    tl.store(states + t * B * H + place, state, mask=inside)
    if COPIES:
        tl.store(factors + t * B * H + place, state, mask=inside)
    if KEEPS:
        tl.store(memories + t * B * H + place, memory, mask=inside)
        gate = gates + t * B * (4 * H) + place_4
        tl.store(gate, let_in, mask=inside)
        tl.store(gate + H, forget, mask=inside)
        tl.store(gate + 2 * H, new, mask=inside)
        tl.store(gate + 3 * H, let_out, mask=inside)
    else:
        tl.store(memories + place, memory, mask=inside)


@triton.jit(do_not_specialize=["t"])
def _backward(
    g, gates, memories, w, dgates, carried, db, t, B, T, sw_c,
    H: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute time step t of the backward pass, which starts with the last one."""
    client = tl.program_id(2).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    o = tl.program_id(0) * BH + tl.arange(0, BH)
    inside = (b < B)[:, None] & (o < H)[None, :]
    place = b[:, None] * H + o[None, :]
    place_4 = b[:, None] * (4 * H) + o[None, :]
    g += client * T * B * H
    memories += client * T * B * H
    gates += client * T * B * (4 * H)
    dgates += client * T * B * (4 * H)
    w += client * sw_c
    carried += client * B * H + place
    group = client * tl.num_programs(1) + tl.program_id(1)
    db += group * (4 * H) + o
    later = (o < H) & (t + 1 < T)
    db_i = tl.load(db, mask=later, other=0.0)
    db_f = tl.load(db + H, mask=later, other=0.0)
    db_n = tl.load(db + 2 * H, mask=later, other=0.0)
    db_o = tl.load(db + 3 * H, mask=later, other=0.0)
    dmemory = tl.load(carried, mask=inside & (t + 1 < T), other=0.0)
    dstate = tl.zeros([BB, BH], tl.float32)
    for k0 in range(0, 4 * H, BK):
        k = k0 + tl.arange(0, BK)
        after = dgates + (t + 1) * B * (4 * H) + b[:, None] * (4 * H) + k[None, :]
        valid = (b < B)[:, None] & (k < 4 * H)[None, :] & (t + 1 < T)
        a = tl.load(after, mask=valid, other=0.0)
        valid = (o < H)[None, :] & (k < 4 * H)[:, None]
        f = tl.load(w + o[None, :] * (4 * H) + k[:, None], mask=valid, other=0.0)
        dstate = tl.dot(a, f, dstate, input_precision=PRECISION)
    dstate += tl.load(g + t * B * H + place, mask=inside, other=0.0)
    gate = gates + t * B * (4 * H) + place_4
    let_in = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    forget = tl.load(gate + H, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(gate + 2 * H, mask=inside, other=0.0).to(tl.float32)
    let_out = tl.load(gate + 3 * H, mask=inside, other=0.0).to(tl.float32)
    shown = _tanh(tl.load(memories + t * B * H + place, mask=inside, other=0.0))
    before = tl.load(memories + (t - 1) * B * H + place, mask=inside & (t > 0), other=0.0)
    dmemory += dstate * let_out * (1.0 - shown * shown)
    d_i = dmemory * new * let_in * (1.0 - let_in)
    d_f = dmemory * before * forget * (1.0 - forget)
    d_n = dmemory * let_in * (1.0 - new * new)
    d_o = dstate * shown * let_out * (1.0 - let_out)
    dmemory *= forget
    dgate = dgates + t * B * (4 * H) + place_4
    tl.store(dgate, d_i, mask=inside)
    tl.store(dgate + H, d_f, mask=inside)
    tl.store(dgate + 2 * H, d_n, mask=inside)
    tl.store(dgate + 3 * H, d_o, mask=inside)
    db_i += tl.sum(d_i, axis=0)
    db_f += tl.sum(d_f, axis=0)
    db_n += tl.sum(d_n, axis=0)
    db_o += tl.sum(d_o, axis=0)
    tl.store(carried, dmemory, mask=inside)
    tl.store(db, db_i, mask=o < H)
    tl.store(db + H, db_f, mask=o < H)
    tl.store(db + 2 * H, db_n, mask=o < H)
    tl.store(db + 3 * H, db_o, mask=o < H)


def forward(
    products: Tensor, w: Tensor, bias_1: Tensor, bias_2: Tensor, precision: str, keeps: bool, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the states, and return gates [c, T, b, 4h], memories [c, T, b, h] and the states as factors.

    Args:
        products: of the input and its weights, float32 [c, T, b, 4h], contiguous; it may be overwritten.
        w: weights of the state, [c, 4h, h], contiguous rows w[i]; float32, or bfloat16 for products of bfloat16.
        bias_1: [c, 4h], contiguous rows.
        bias_2: [c, 4h], contiguous rows.
        precision: of float32 products: tf32x3 or tf32.
        keeps: whether a backward pass needs gates and memories; if not, they are not returned in full.
        states: [c, T, b, h], contiguous; it is written.
    """
    clients, times, samples, hidden = states.shape
    memories = torch.empty_like(states) if keeps else states.new_empty((clients, 1, samples, hidden))
    copies = w.dtype != states.dtype
    factors = torch.empty_like(states, dtype=w.dtype) if copies else states
    gates = torch.empty_like(products, dtype=w.dtype) if copies and keeps else products
    arrays = products, w, bias_1, bias_2, gates, memories, states, factors
    parts = lstm_sequence.launches(w, clients, samples, hidden, precision) if persistent else None
    if parts is not None:
        for part in parts:
            lstm_sequence.forward(*(array[part] for array in arrays), precision, keeps, copies)
        return gates, memories, factors
    tile = _tile(w, clients, samples, hidden, side(hidden, 64), 4, precision)
    grid = (triton.cdiv(hidden, tile.units), triton.cdiv(samples, tile.samples), clients)
    for t in range(times):
        _forward[grid](
            *arrays, t, samples, times, w.stride(0), bias_1.stride(0), bias_2.stride(0),
            H=hidden, KEEPS=keeps, COPIES=copies, PRECISION=precision,
            BB=tile.samples, BH=tile.units, BK=tile.inner, num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
    return gates, memories, factors


def backward(g: Tensor, gates: Tensor, memories: Tensor, w: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of the gates before their nonlinearities, [c, T, b, 4h], and of a bias, [c, 4h].

    The first has the type of `w`, because it is a factor of all further products.

    Args:
        g: gradient of the states, [c, T, b, h], contiguous.
        gates: from the forward pass, [c, T, b, 4h], contiguous.
        memories: from the forward pass, [c, T, b, h], contiguous.
        w: weights of the state, transposed, [c, h, 4h], contiguous rows w[i].
        precision: of float32 products: tf32x3 or tf32.
    """
    clients, times, samples, hidden = g.shape
    tile = _tile(w, clients, samples, hidden, side(4 * hidden, 128), 1, precision)
    grid = (triton.cdiv(hidden, tile.units), triton.cdiv(samples, tile.samples), clients)
    dgates = torch.empty_like(gates, dtype=w.dtype)
    db = g.new_empty((clients, grid[1], 4 * hidden))
    parts = lstm_sequence.launches(w, clients, samples, hidden, precision, backwards=True) if persistent else None
    if parts is not None:
        for part in parts:
            lstm_sequence.backward(*(array[part] for array in (g, gates, memories, w, dgates, db)), precision)
        return dgates, db.sum(dim=1)
    carried = g.new_empty((clients, samples, hidden))
    for t in reversed(range(times)):
        _backward[grid](
            g, gates, memories, w, dgates, carried, db, t, samples, times, w.stride(0), H=hidden, PRECISION=precision,
            BB=tile.samples, BH=tile.units, BK=tile.inner, num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
    return dgates, db.sum(dim=1)


class Tile(NamedTuple):
    """Sizes of a program's tiles, and how many of them are loaded ahead."""

    samples: int
    units: int
    inner: int
    stages: int


def _tile(w: Tensor, clients: int, samples: int, hidden: int, inner: int, gates: int, precision: str) -> Tile:
    """Return the tiles for products with `gates` tiles of weights at once.

    Small blocks of units spread few clients over the card; large ones read the states of many clients less often.
    """
    rows = side(samples, 32)  # as in `lstm_sequence`
    programs = clients * triton.cdiv(samples, rows) * triton.cdiv(hidden, 16)
    units = 16 if programs <= 2 * processors(w.device) else side(hidden, 32)
    # Two programs at a time on a processor.
    limit = shared_memory(w.device) // 2 - 2048
    while True:
        per_stage = w.element_size() * inner * (rows + gates * units) * (4 if precision == "tf32x3" else 3) // 3
        stages = 1 + limit // per_stage
        if stages >= 3 or inner <= 32:
            return Tile(rows, units, inner, max(2, min(5, stages)))
        inner //= 2
