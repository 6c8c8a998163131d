"""Small things that would each be many kernels: loss, joined gradients, SGD, Adam, pixels, random keys and choices."""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_SHARES = 64  # parts that a client's squared gradient norm is summed in


@triton.jit
def _cross_entropy(
    scores, y, weight, loss, gradient, ss_c, sy_c, sw_c,
    B: tl.constexpr, C: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    whole = tl.zeros([BB], tl.float32)
    for b0 in range(0, B, BB):
        b = b0 + tl.arange(0, BB)
        whole += tl.load(weight + client * sw_c + b, mask=b < B, other=0.0)
    samples = tl.sum(whole)
    total = tl.zeros([BB], tl.float32)
    for b0 in range(0, B, BB):
        b = b0 + tl.arange(0, BB)
        valid = (b < B)[:, None] & (c < C)[None, :]
        z = tl.load(scores + client * ss_c + b[:, None] * C + c[None, :], mask=valid, other=float("-inf"))
        label = tl.load(y + client * sy_c + b, mask=b < B, other=0)
        share = tl.load(weight + client * sw_c + b, mask=b < B, other=0.0) / samples
        most = tl.max(z, axis=1)
        most = tl.where(b < B, most, 0.0)
        exponent = tl.exp(z - most[:, None])
        sums = tl.sum(exponent, axis=1)
        is_label = c[None, :] == label[:, None]
        of_label = tl.sum(tl.where(is_label & valid, z, 0.0), axis=1)
        total += tl.where(b < B, share * (tl.log(sums) + most - of_label), 0.0)
        d = share[:, None] * (exponent / sums[:, None] - tl.where(is_label, 1.0, 0.0))
        tl.store(gradient + (client * B + b)[:, None] * C + c[None, :], d, mask=valid)
    tl.store(loss + client, tl.sum(total))


@triton.jit
def _join(parts, strides, out, D: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr):
    """One program per client and block of its vector, which lies in one part or in a few."""
    client = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    at = first + tl.arange(0, BLOCK)
    value = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(len(parts)):
        if (first < STARTS[i + 1]) & (first + BLOCK > STARTS[i]):
            inside = (at >= STARTS[i]) & (at < STARTS[i + 1])
            there = tl.load(parts[i] + client * strides[i] + (at - STARTS[i]), mask=inside, other=0.0)
            value = tl.where(inside, there, value)
    tl.store(out + client * D + at, value, mask=at < D)


@triton.jit
def _squares(g, partial, sg_c, D: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    share = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, SHARES * BLOCK):
        at = start + share * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(g + client * sg_c + at, mask=at < D, other=0.0)
        total += value * value
    tl.store(partial + client * SHARES + share, tl.sum(total))


@triton.jit
def _sgd(
    theta, velocity, g, partial, active, new_theta, new_velocity, D, st_c, sv_c, sg_c, lr, momentum, decay, clip,
    CLIP: tl.constexpr, MASKED: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < D
    d = tl.load(g + client * sg_c + at, mask=there, other=0.0)
    if CLIP:
        norm = tl.sqrt(tl.sum(tl.load(partial + client * SHARES + tl.arange(0, SHARES))))
        scale = clip / (norm + 1e-6)
        d *= tl.where(scale >= 1.0, 1.0, scale)  # NaN stays NaN
    t = tl.load(theta + client * st_c + at, mask=there, other=0.0)
    v = momentum * tl.load(velocity + client * sv_c + at, mask=there, other=0.0) + d + decay * t
    change = lr * v
    if MASKED:
        change = tl.where(tl.load(active + client) != 0, change, 0.0)
    tl.store(new_velocity + client * D + at, v, mask=there)
    tl.store(new_theta + client * D + at, t - change, mask=there)


@triton.jit
def _pixels(
    x, rows, scale, shift, out, sr_c, BATCH: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per sample and block of it; stored channels first, written channels last."""
    sample = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel, pixel = at % CHANNELS, at // CHANNELS
    there = at < SIZE
    row = tl.load(rows + (sample // BATCH) * sr_c + sample % BATCH)
    value = tl.load(x + row * SIZE + channel * PIXELS + pixel, mask=there, other=0).to(tl.float32)
    factor = tl.load(scale + channel, mask=there, other=0.0)
    value = value * factor + tl.load(shift + channel, mask=there, other=0.0)
    tl.store(out + sample * SIZE + at, value, mask=there)


@triton.jit
def _adam(
    p, g, m, v, step, scale, new_p, new_m, new_v, D, lr, decay, first_decay, second_decay, epsilon,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < D
    count = tl.load(step).to(tl.float32)
    unbias_first = 1 - tl.exp2(count * tl.log2(first_decay))
    unbias_second = 1 - tl.exp2(count * tl.log2(second_decay))
    here = tl.load(p + at, mask=there, other=0.0)
    d = tl.load(g + at, mask=there, other=0.0)
    if SCALED:
        d *= tl.load(scale)
    d += decay * here
    first = first_decay * tl.load(m + at, mask=there, other=0.0) + (1 - first_decay) * d
    second = second_decay * tl.load(v + at, mask=there, other=0.0) + (1 - second_decay) * d * d
    change = (first / unbias_first) / (tl.sqrt(second / unbias_second) + epsilon)
    tl.store(new_p + at, here - lr * change, mask=there)
    tl.store(new_m + at, first, mask=there)
    tl.store(new_v + at, second, mask=there)


@triton.jit
def _scramble(x, MULTIPLY_1: tl.constexpr, MULTIPLY_2: tl.constexpr):
    """Return a bijective hash of int64 values; see `pefll.randomness`."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MULTIPLY_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MULTIPLY_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _key(
    root, coordinates, strides, out, CLIENTS, GOLDEN: tl.constexpr, MULTIPLY_1: tl.constexpr,
    MULTIPLY_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mix coordinates of each client into a key, one after another; see `pefll.randomness.key`."""
    client = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = client < CLIENTS
    state = root + tl.zeros([BLOCK], tl.int64)
    for i in tl.static_range(len(coordinates)):
        coordinate = tl.load(coordinates[i] + client * strides[i], mask=there, other=0)
        state = _scramble((state ^ coordinate) + GOLDEN, MULTIPLY_1, MULTIPLY_2)
    tl.store(out + client, state, mask=there)


@triton.jit
def _spread(
    state, out, TOTAL, COUNT, GOLDEN: tl.constexpr, MULTIPLY_1: tl.constexpr,
    MULTIPLY_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make COUNT keys of each; see `pefll.randomness.spread`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < TOTAL
    key = tl.load(state + at // COUNT, mask=there, other=0)
    tl.store(out + at, _scramble(key + (at % COUNT + 1) * GOLDEN, MULTIPLY_1, MULTIPLY_2), mask=there)


@triton.jit
def _below(x, total):
    """Return x modulo total, not negative."""
    rest = x % total
    return tl.where(rest < 0, rest + total, rest)


@triton.jit
def _choose(
    state, total, out, COUNT: tl.constexpr, SHUFFLES: tl.constexpr, GOLDEN: tl.constexpr, STRIDE: tl.constexpr,
    MULTIPLY_1: tl.constexpr, MULTIPLY_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per draw and block of it; see `pefll.randomness.choose`."""
    draw = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(state + draw)
    cards = tl.load(total + draw)
    card = place.to(tl.int64) % cards
    for _ in range(SHUFFLES):
        key += GOLDEN
        mirror = _below(_scramble(key, MULTIPLY_1, MULTIPLY_2), cards)
        factor = _scramble(key + STRIDE, MULTIPLY_1, MULTIPLY_2)
        term = _scramble(key + STRIDE + STRIDE, MULTIPLY_1, MULTIPLY_2)
        partner = _below(mirror - card, cards)
        coin = tl.maximum(card, partner) * factor + term
        card = tl.where(coin < 0, partner, card)
    tl.store(out + draw * COUNT + place, card, mask=place < COUNT)


def cross_entropy(scores: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean cross-entropy [c] and its gradient [c, b, classes].

    Args:
        scores: [c, b, classes], each client's contiguous.
        y: int64 [c, b], each client's contiguous.
        weight: [c, b], each client's contiguous.
    """
    clients, samples, classes = scores.shape
    loss = scores.new_empty(clients)
    gradient = scores.new_empty(scores.shape)
    wide = max(16, triton.next_power_of_2(classes))
    _cross_entropy[(clients,)](
        scores, y, weight, loss, gradient, scores.stride(0), y.stride(0), weight.stride(0), samples, classes,
        BB=min(triton.next_power_of_2(samples), max(1, 8192 // wide)), BC=wide, num_warps=4,
    )  # fmt: skip
    return loss, gradient


def join(parts: list[Tensor]) -> Tensor:
    """Return parts [c, ...], each client's contiguous, as one vector for each client, [c, D]."""
    clients = len(parts[0])
    starts = tuple(accumulate((part[0].numel() for part in parts), initial=0))
    out = parts[0].new_empty((clients, starts[-1]))
    strides = tuple(part.stride(0) for part in parts)
    grid = (triton.cdiv(starts[-1], _BLOCK), clients)
    _join[grid](tuple(parts), strides, out, starts[-1], starts, BLOCK=_BLOCK, num_warps=4)
    return out


def sgd(
    theta: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    active: Tensor | None,
    lr: float,
    momentum: float,
    decay: float,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity [c, D] after one step of SGD.

    Args:
        theta: [c, D], each client's contiguous.
        velocity: [c, D], likewise.
        gradient: [c, D], likewise.
        active: bool [c], which clients take the step; None for all.
        lr: learning rate.
        momentum: of the velocity.
        decay: weight decay.
        clip: the gradient's norm is cut to this.
    """
    clients, size = theta.shape
    new_theta, new_velocity = theta.new_empty(theta.shape), theta.new_empty(theta.shape)
    partial = theta.new_empty((clients, _SHARES) if clip is not None else (1,))
    if clip is not None:
        _squares[(_SHARES, clients)](gradient, partial, gradient.stride(0), size, _SHARES, _BLOCK, num_warps=4)
    _sgd[(triton.cdiv(size, _BLOCK), clients)](
        theta, velocity, gradient, partial, theta if active is None else active, new_theta, new_velocity, size,
        theta.stride(0), velocity.stride(0), gradient.stride(0), lr, momentum, decay, 0.0 if clip is None else clip,
        CLIP=clip is not None, MASKED=active is not None, SHARES=_SHARES, BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip
    return new_theta, new_velocity


def pixels(x: Tensor, rows: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return samples `rows` of x, scaled and shifted per channel, as float32 [c, b, h, w, channels].

    Args:
        x: uint8 [N, channels, h, w], contiguous.
        rows: int64 [c, b], each client's contiguous.
        scale: [channels].
        shift: [channels].
    """
    channels, height, width = x.shape[1:]
    out = torch.empty((*rows.shape, height, width, channels), dtype=torch.float32, device=x.device)
    size = channels * height * width
    block = min(1024, triton.next_power_of_2(size))
    grid = (rows.numel(), triton.cdiv(size, block))
    _pixels[grid](
        x,
        rows,
        scale,
        shift,
        out,
        rows.stride(0),
        rows.shape[1],
        size,
        height * width,
        channels,
        BLOCK=block,
        num_warps=4,
    )
    return out


def adam(
    parameters: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    scale: Tensor | None,
    lr: float,
    decay: float,
    first_decay: float,
    second_decay: float,
    epsilon: float,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameters and both moments [D] after one step of Adam, from contiguous ones; see `pefll.methods.adam`."""
    size = parameters.numel()
    old = (parameters, first, second)
    new = old if in_place else tuple(torch.empty_like(part) for part in old)
    _adam[(triton.cdiv(size, _BLOCK),)](
        parameters, gradient, first, second, step, step if scale is None else scale, *new, size, lr, decay, first_decay,
        second_decay, epsilon, SCALED=scale is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return new


def key(root: int, coordinates: list[Tensor], golden: int, multiply: tuple[int, int]) -> Tensor:
    """Return a key for each client, int64 [c], of coordinates int64 [c]; see `pefll.randomness.key`."""
    clients = len(coordinates[0])
    out = torch.empty(clients, dtype=torch.int64, device=coordinates[0].device)
    strides = tuple(coordinate.stride(0) for coordinate in coordinates)
    _key[(triton.cdiv(clients, 128),)](
        root, tuple(coordinates), strides, out, clients, golden, *multiply, BLOCK=128, num_warps=4
    )
    return out


def spread(state: Tensor, count: int, golden: int, multiply: tuple[int, int]) -> Tensor:
    """Return `count` keys, int64 [keys, count], for each in `state`, int64 [keys], contiguous."""
    out = torch.empty((len(state), count), dtype=torch.int64, device=state.device)
    total = out.numel()
    _spread[(triton.cdiv(total, 256),)](state, out, total, count, golden, *multiply, BLOCK=256, num_warps=4)
    return out


def choose(state: Tensor, total: Tensor, count: int, shuffles: int, golden: int, multiply: tuple[int, int]) -> Tensor:
    """Return `count` different integers below `total`, int64 [draws, count]; see `pefll.randomness.choose`.

    Args:
        state: int64 [draws], contiguous.
        total: int64 [draws], contiguous.
        count: how many.
        shuffles: rounds of the shuffle.
        golden: constant of the key sequence.
        multiply: constants of the hash.
    """
    out = torch.empty((len(state), count), dtype=torch.int64, device=state.device)
    stride = (shuffles * golden + (1 << 63)) % (1 << 64) - (1 << 63)  # as int64 wraps around
    block = min(256, triton.next_power_of_2(count))
    grid = (len(state), triton.cdiv(count, block))
    _choose[grid](state, total, out, count, shuffles, golden, stride, *multiply, BLOCK=block, num_warps=1)
    return out
