"""Triton kernels for the loss, pixels, random keys and random choices. torch would launch many kernels for each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
def _pixels(
    x, rows, scale, shift, out, sr_c, BATCH: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes a block of one sample. It reads channels first and writes channels last."""
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
def _scramble(x, MULTIPLY_1: tl.constexpr, MULTIPLY_2: tl.constexpr):
    """Return a bijective hash of int64 values; see `pefll.core.randomness`."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MULTIPLY_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MULTIPLY_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _key(
    root, coordinates, strides, out, CLIENTS, GOLDEN: tl.constexpr, MULTIPLY_1: tl.constexpr,
    MULTIPLY_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Hash the coordinates of each client into a key; see `pefll.core.randomness.key`."""
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
    """Write COUNT keys for each key; see `pefll.core.randomness.spread`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < TOTAL
    key = tl.load(state + at // COUNT, mask=there, other=0)
    tl.store(out + at, _scramble(key + (at % COUNT + 1) * GOLDEN, MULTIPLY_1, MULTIPLY_2), mask=there)


@triton.jit
def _below(x, total):
    """Return x modulo total; never negative."""
    rest = x % total
    return tl.where(rest < 0, rest + total, rest)


@triton.jit
def _choose(
    state, total, out, COUNT: tl.constexpr, SHUFFLES: tl.constexpr, GOLDEN: tl.constexpr, STRIDE: tl.constexpr,
    MULTIPLY_1: tl.constexpr, MULTIPLY_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes a block of one draw; see `pefll.core.randomness.choose`."""
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
        scores: [c, b, classes], contiguous rows.
        y: int64 [c, b], contiguous rows.
        weight: [c, b], contiguous rows.
    """
    clients, samples, classes = scores.shape
    loss = scores.new_empty(clients)
    gradient = scores.new_empty(scores.shape)
    bc = max(16, triton.next_power_of_2(classes))
    _cross_entropy[(clients,)](
        scores, y, weight, loss, gradient, scores.stride(0), y.stride(0), weight.stride(0), samples, classes,
        BB=min(triton.next_power_of_2(samples), max(1, 8192 // bc)), BC=bc, num_warps=4,
    )  # fmt: skip
    return loss, gradient


def pixels(x: Tensor, rows: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return samples `rows` of x, scaled and shifted per channel, as float32 [c, b, h, w, channels].

    Args:
        x: uint8 [N, channels, h, w], contiguous.
        rows: int64 [c, b], contiguous rows.
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


def key(root: int, coordinates: list[Tensor], golden: int, multiply: tuple[int, int]) -> Tensor:
    """Return a key for each client, int64 [c], from coordinates, each int64 [c]; see `pefll.core.randomness.key`."""
    clients = len(coordinates[0])
    out = torch.empty(clients, dtype=torch.int64, device=coordinates[0].device)
    strides = tuple(coordinate.stride(0) for coordinate in coordinates)
    _key[(triton.cdiv(clients, 128),)](
        root, tuple(coordinates), strides, out, clients, golden, *multiply, BLOCK=128, num_warps=4
    )
    return out


def spread(state: Tensor, count: int, golden: int, multiply: tuple[int, int]) -> Tensor:
    """Return `count` new keys for each key, int64 [keys, count]. `state` is int64 [keys], contiguous."""
    out = torch.empty((len(state), count), dtype=torch.int64, device=state.device)
    total = out.numel()
    _spread[(triton.cdiv(total, 256),)](state, out, total, count, golden, *multiply, BLOCK=256, num_warps=4)
    return out


def choose(state: Tensor, total: Tensor, count: int, shuffles: int, golden: int, multiply: tuple[int, int]) -> Tensor:
    """Return `count` different integers below `total`, int64 [draws, count]; see `pefll.core.randomness.choose`.

    Args:
        state: the key of each draw, int64 [draws], contiguous.
        total: the integers of each draw are below this number, int64 [draws], contiguous.
        count: number of integers in a draw.
        shuffles: number of rounds of the shuffle.
        golden: constant of the key sequence.
        multiply: constants of the hash.
    """
    out = torch.empty((len(state), count), dtype=torch.int64, device=state.device)
    stride = (shuffles * golden + (1 << 63)) % (1 << 64) - (1 << 63)  # wraps around as int64 does
    block = min(256, triton.next_power_of_2(count))
    grid = (len(state), triton.cdiv(count, block))
    _choose[grid](state, total, out, count, shuffles, golden, stride, *multiply, BLOCK=block, num_warps=1)
    return out
