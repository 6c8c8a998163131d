"""Triton kernels for all time steps of an LSTM layer in one launch, with a client axis, forward and backward.

A program has a block of hidden units and a block of samples of one client, as in `pefll.backend.kernels.lstm`. It keeps
its weights in shared memory. After each time step it waits for the other programs of the same samples, because the next
step needs all hidden units. So all programs must run at the same time; a cooperative launch fails if they cannot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pefll.backend.kernels.tiles import processors, shared_memory, side

UNITS = 16  # of a program
# If the clients do not fit on the card at the same time, they are split over several launches, at most so many:
MOST_LAUNCHES = 4


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _arrive(arrived):
    """Publish what this program has written."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release")


@triton.jit
def _wait(arrived, target):
    """Wait until `target` calls of `_arrive`; what was written before them can then be read."""
    while tl.atomic_add(arrived, 0, sem="acquire") < target:
        pass
    tl.debug_barrier()


@triton.jit
def _forward(
    products, w, bias_1, bias_2, gates, memories, states, factors, arrived, B, T, sw_c, s1_c, s2_c,
    H: tl.constexpr, KEEPS: tl.constexpr, COPIES: tl.constexpr, PRECISION: tl.constexpr,
    BB: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute all time steps; see `pefll.backend.kernels.lstm` for the arrays. BK is at least H."""
    client = tl.program_id(2).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    o = tl.program_id(0) * BH + tl.arange(0, BH)
    k = tl.arange(0, BK)
    inside = (b < B)[:, None] & (o < H)[None, :]
    place = b[:, None] * H + o[None, :]  # offsets in an array with one number per sample and unit
    place_4 = b[:, None] * (4 * H) + o[None, :]  # offsets of the first gate; the next is H further
    states += client * T * B * H
    factors += client * T * B * H
    memories += client * (T if KEEPS else 1) * B * H
    products += client * T * B * (4 * H) + place_4
    gates += client * T * B * (4 * H) + place_4
    arrived += client * tl.num_programs(1) + tl.program_id(1)
    # Columns in the order unit 0 gate 0, unit 0 gate 1, ...: the sums of a unit are then next to each other.
    column = tl.arange(0, 4 * BH)
    unit = tl.program_id(0) * BH + column // 4
    weight = w + client * sw_c + ((column % 4) * H + unit)[None, :] * H + k[:, None]
    f = tl.load(weight, mask=(unit < H)[None, :] & (k < H)[:, None], other=0.0)
    bias_1 += client * s1_c + o
    bias_2 += client * s2_c + o
    bias_i = (tl.load(bias_1, mask=o < H, other=0.0) + tl.load(bias_2, mask=o < H, other=0.0))[None, :]
    bias_f = (tl.load(bias_1 + H, mask=o < H, other=0.0) + tl.load(bias_2 + H, mask=o < H, other=0.0))[None, :]
    bias_n = (tl.load(bias_1 + 2 * H, mask=o < H, other=0.0) + tl.load(bias_2 + 2 * H, mask=o < H, other=0.0))[None, :]
    bias_o = (tl.load(bias_1 + 3 * H, mask=o < H, other=0.0) + tl.load(bias_2 + 3 * H, mask=o < H, other=0.0))[None, :]
    # What does not depend on other programs is loaded a time step ahead, while the program waits.
    next_i = tl.load(products, mask=inside, other=0.0)
    next_f = tl.load(products + H, mask=inside, other=0.0)
    next_n = tl.load(products + 2 * H, mask=inside, other=0.0)
    next_o = tl.load(products + 3 * H, mask=inside, other=0.0)
    memory = tl.zeros([BB, BH], tl.float32)
    # Never pipelined: a load ahead of its time step would miss what other programs write.
    for t in tl.range(0, T, num_stages=1):
        before = factors + (t - 1) * B * H + b[:, None] * H + k[None, :]
        a = tl.load(before, mask=(b < B)[:, None] & (k < H)[None, :] & (t > 0), other=0.0, cache_modifier=".cg")
        total = tl.dot(a, f, input_precision=PRECISION)
        even, odd = tl.split(tl.reshape(total, [BB, BH, 2, 2]))
        let_in, new = tl.split(even)
        forget, let_out = tl.split(odd)
        let_in = tl.sigmoid(let_in + next_i + bias_i)
        forget = tl.sigmoid(forget + next_f + bias_f)
        new = _tanh(new + next_n + bias_n)
        let_out = tl.sigmoid(let_out + next_o + bias_o)
        memory = forget * memory + let_in * new
        state = let_out * _tanh(memory)
        tl.store(factors + t * B * H + place, state, mask=inside)
        _arrive(arrived)
        if COPIES:
            tl.store(states + t * B * H + place, state, mask=inside)
        if KEEPS:
            tl.store(memories + t * B * H + place, memory, mask=inside)
            gate = gates + t * B * (4 * H)
            tl.store(gate, let_in, mask=inside)
            tl.store(gate + H, forget, mask=inside)
            tl.store(gate + 2 * H, new, mask=inside)
            tl.store(gate + 3 * H, let_out, mask=inside)
        ahead = products + (t + 1) * B * (4 * H)
        more = inside & (t + 1 < T)
        next_i = tl.load(ahead, mask=more, other=0.0)
        next_f = tl.load(ahead + H, mask=more, other=0.0)
        next_n = tl.load(ahead + 2 * H, mask=more, other=0.0)
        next_o = tl.load(ahead + 3 * H, mask=more, other=0.0)
        _wait(arrived, (t + 1) * tl.num_programs(0))


@triton.jit
def _backward(
    g, gates, memories, w, dgates, db, arrived, B, T, sw_c,
    H: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the gates' gradients of all time steps. BK is at least 4 * H."""
    client = tl.program_id(2).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    o = tl.program_id(0) * BH + tl.arange(0, BH)
    k = tl.arange(0, BK)
    inside = (b < B)[:, None] & (o < H)[None, :]
    place = b[:, None] * H + o[None, :]
    place_4 = b[:, None] * (4 * H) + o[None, :]
    g += client * T * B * H + place
    memories += client * T * B * H + place
    gates += client * T * B * (4 * H) + place_4
    dgates += client * T * B * (4 * H)
    group = client * tl.num_programs(1) + tl.program_id(1)
    db += group * (4 * H) + o
    arrived += group
    weight = w + client * sw_c + o[None, :] * (4 * H) + k[:, None]
    f = tl.load(weight, mask=(o < H)[None, :] & (k < 4 * H)[:, None], other=0.0)
    last = gates + (T - 1) * B * (4 * H)
    let_in = tl.load(last, mask=inside, other=0.0).to(tl.float32)
    forget = tl.load(last + H, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(last + 2 * H, mask=inside, other=0.0).to(tl.float32)
    let_out = tl.load(last + 3 * H, mask=inside, other=0.0).to(tl.float32)
    memory = tl.load(memories + (T - 1) * B * H, mask=inside, other=0.0)
    before = tl.load(memories + (T - 2) * B * H, mask=inside & (T > 1), other=0.0)
    given = tl.load(g + (T - 1) * B * H, mask=inside, other=0.0)
    sum_i = tl.zeros([BB, BH], tl.float32)
    sum_f = tl.zeros([BB, BH], tl.float32)
    sum_n = tl.zeros([BB, BH], tl.float32)
    sum_o = tl.zeros([BB, BH], tl.float32)
    dmemory = tl.zeros([BB, BH], tl.float32)
    for step in tl.range(0, T, num_stages=1):
        t = T - 1 - step
        after = dgates + (t + 1) * B * (4 * H) + b[:, None] * (4 * H) + k[None, :]
        known = (b < B)[:, None] & (k < 4 * H)[None, :] & (step > 0)
        a = tl.load(after, mask=known, other=0.0, cache_modifier=".cg")
        # Splitting and joining moves the sums out of the layout of tensor cores. Without this step, the compiler would
        # use that layout for everything below.
        even, odd = tl.split(tl.reshape(tl.dot(a, f, input_precision=PRECISION), [BB, BH // 2, 2]))
        dstate = tl.reshape(tl.join(even, odd), [BB, BH]) + given
        shown = _tanh(memory)
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
        _arrive(arrived)
        sum_i += d_i
        sum_f += d_f
        sum_n += d_n
        sum_o += d_o
        earlier = inside & (t > 0)
        gate = gates + (t - 1) * B * (4 * H)
        let_in = tl.load(gate, mask=earlier, other=0.0).to(tl.float32)
        forget = tl.load(gate + H, mask=earlier, other=0.0).to(tl.float32)
        new = tl.load(gate + 2 * H, mask=earlier, other=0.0).to(tl.float32)
        let_out = tl.load(gate + 3 * H, mask=earlier, other=0.0).to(tl.float32)
        memory = before
        before = tl.load(memories + (t - 2) * B * H, mask=inside & (t > 1), other=0.0)
        given = tl.load(g + (t - 1) * B * H, mask=earlier, other=0.0)
        _wait(arrived, (step + 1) * tl.num_programs(0))
    tl.store(db, tl.sum(sum_i, axis=0), mask=o < H)
    tl.store(db + H, tl.sum(sum_f, axis=0), mask=o < H)
    tl.store(db + 2 * H, tl.sum(sum_n, axis=0), mask=o < H)
    tl.store(db + 3 * H, tl.sum(sum_o, axis=0), mask=o < H)


def launches(
    w: Tensor, clients: int, samples: int, hidden: int, precision: str, backwards: bool = False
) -> list[slice] | None:
    """Return the clients of each launch, which fit on the card at the same time; None for more than MOST_LAUNCHES.

    Args:
        w: weights of the state, in the type of factors.
        clients: all of them.
        samples: b.
        hidden: h.
        precision: of products of float32 factors.
        backwards: for the backward pass.
    """
    blocks, rows = triton.cdiv(hidden, UNITS), _rows(samples)
    groups = blocks * triton.cdiv(samples, rows)  # programs of a client
    if w.is_cuda:
        inner, columns = (side(4 * hidden, 1 << 20), UNITS) if backwards else (side(hidden, 1 << 20), 4 * UNITS)
        needed = w.element_size() * inner * (rows + columns) * (5 if precision == "tf32x3" else 3) // 3 + 2048
        at_once = min(4, shared_memory(w.device) // needed) * processors(w.device) // groups
    else:
        at_once = clients if blocks == 1 else 0  # the interpreter runs one program after another: none may wait
    if at_once * MOST_LAUNCHES < clients:
        return None
    number = triton.cdiv(clients, at_once)
    each = triton.cdiv(clients, number)
    return [slice(first, first + each) for first in range(0, clients, each)]


def forward(
    products: Tensor,
    w: Tensor,
    bias_1: Tensor,
    bias_2: Tensor,
    gates: Tensor,
    memories: Tensor,
    states: Tensor,
    factors: Tensor,
    precision: str,
    keeps: bool,
    copies: bool,
) -> None:
    """Write gates, memories, states and factors of all clients, which must fit on the card at the same time.

    The arrays are those of `pefll.backend.kernels.lstm.forward`. If `copies`, factors are an array
    of their own, and not the states.
    """
    clients, times, samples, hidden = states.shape
    grid = (triton.cdiv(hidden, UNITS), triton.cdiv(samples, _rows(samples)), clients)
    _forward[grid](
        products, w, bias_1, bias_2, gates, memories, states, factors, _counters(w, grid), samples, times,
        w.stride(0), bias_1.stride(0), bias_2.stride(0), H=hidden, KEEPS=keeps, COPIES=copies,
        PRECISION=precision, BB=_rows(samples), BH=UNITS, BK=side(hidden, 1 << 20), **_options(w, grid),
    )  # fmt: skip


def backward(g: Tensor, gates: Tensor, memories: Tensor, w: Tensor, dgates: Tensor, db: Tensor, precision: str) -> None:
    """Write the gates' gradients, and those of the biases for each block of samples, [c, blocks, 4h]."""
    clients, times, samples, hidden = g.shape
    grid = (triton.cdiv(hidden, UNITS), triton.cdiv(samples, _rows(samples)), clients)
    _backward[grid](
        g, gates, memories, w, dgates, db, _counters(w, grid), samples, times, w.stride(0),
        H=hidden, PRECISION=precision, BB=_rows(samples), BH=UNITS, BK=side(4 * hidden, 1 << 20), **_options(w, grid),
    )  # fmt: skip


def _rows(samples: int) -> int:
    return side(samples, 32)


def _counters(like: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Return counters of programs, zeros [c, blocks of samples]."""
    return torch.zeros((grid[2], grid[1]), dtype=torch.int32, device=like.device)


def _options(w: Tensor, grid: tuple[int, int, int]) -> dict[str, int | bool]:
    few = grid[0] * grid[1] * grid[2] <= 2 * processors(w.device)
    options: dict[str, int | bool] = {"num_warps": 8 if few else 4, "num_stages": 1}
    if w.is_cuda:
        options["launch_cooperative_grid"] = True  # all programs run at the same time, or the launch fails
    return options
