"""Triton kernels for parameter vectors: joining parts, the norm, steps of SGD and Adam."""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
# Limit for the number of partial sums of a client's squared gradient norm: every program of a step reads all of them.
_MOST_SHARES = 256
_MOST_SHARES_ALONE = 1056  # the limit for a single long vector: eight for each multiprocessor of an H200


@triton.jit
def _join(parts, strides, out, D: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program writes a block of one client's vector. A block spans one or more parts."""
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
def _part_of(
    block, client, parts, STRIDES: tl.constexpr, STARTS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the part with a block. Return its address, its start in the vector, its size, and the block's offset in it.

    Part i has the blocks from BLOCKS[i] to BLOCKS[i + 1], so no block spans two parts. All strides are constants, so
    that the compiler can vectorise loads.
    """
    address = parts[0] + client * STRIDES[0]
    start, size, first = 0, STARTS[1], 0
    for i in tl.static_range(1, len(parts)):
        if block >= BLOCKS[i]:  # the last i for which this is true is the part; so empty parts are skipped
            address = parts[i] + client * STRIDES[i]
            start, size, first = STARTS[i], STARTS[i + 1] - STARTS[i], BLOCKS[i]
    return address, start, size, (block - first) * BLOCK


@triton.jit
def _squares(
    parts, partial, STRIDES: tl.constexpr, STARTS: tl.constexpr, BLOCKS: tl.constexpr, SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program writes the sum of squares of every SHARES-th block of one client."""
    client = tl.program_id(1).to(tl.int64)
    share = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for turn in range(0, BLOCKS[len(parts)], SHARES):
        # A block number may be too large. Such a block is beyond the end of the last part, so all of it is masked.
        address, _, size, first = _part_of(turn + share, client, parts, STRIDES, STARTS, BLOCKS, BLOCK)
        at = first + tl.arange(0, BLOCK)
        value = tl.load(address + at, mask=at < size, other=0.0)
        total += value * value
    tl.store(partial + client * SHARES + share, tl.sum(total))


@triton.jit
def _sgd(
    theta, velocity, parts, partial, active, towards, rate, new_theta, new_velocity, lr, momentum, decay, clip,
    proximal, ST: tl.constexpr, SV: tl.constexpr, SA: tl.constexpr, SR: tl.constexpr, SNT: tl.constexpr,
    SNV: tl.constexpr, STRIDES: tl.constexpr, STARTS: tl.constexpr, BLOCKS: tl.constexpr, MOVING: tl.constexpr,
    CLIP: tl.constexpr, MASKED: tl.constexpr, PULLED: tl.constexpr, RATED: tl.constexpr, SHARES: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes a block of one client. The outputs may be the inputs."""
    client = tl.program_id(1).to(tl.int64)
    address, start, size, first = _part_of(tl.program_id(0), client, parts, STRIDES, STARTS, BLOCKS, BLOCK)
    inside = first + tl.arange(0, BLOCK)
    there = inside < size
    at = start + inside
    # All loads come before the sum of squares, because the threads wait for each other in that sum. The gradient leaves
    # the cache first, because it is not read again. Parameters and velocity are read in every step.
    d = tl.load(address + inside, mask=there, other=0.0, eviction_policy="evict_first")
    t = tl.load(theta + client * ST + at, mask=there, other=0.0, eviction_policy="evict_last")
    v = tl.zeros([BLOCK], tl.float32)
    if MOVING:
        v = momentum * tl.load(velocity + client * SV + at, mask=there, other=0.0, eviction_policy="evict_last")
    if PULLED:
        anchor = tl.load(towards + client * SA + at, mask=there, other=0.0, eviction_policy="evict_last")
    if CLIP:
        share = tl.arange(0, WIDE)
        squares = tl.load(partial + client * SHARES + share, mask=share < SHARES, other=0.0)
        scale = clip / (tl.sqrt(tl.sum(squares)) + 1e-6)
        d *= tl.where(scale >= 1.0, 1.0, scale)  # NaN stays NaN
    v = v + d + decay * t
    if PULLED:
        v += proximal * (t - anchor)
    if RATED:
        lr = tl.load(rate + client * SR).to(tl.float32)
    change = lr * v
    if MASKED:
        change = tl.where(tl.load(active + client) != 0, change, 0.0)
    tl.store(new_velocity + client * SNV + at, v, mask=there, eviction_policy="evict_last")
    tl.store(new_theta + client * SNT + at, t - change, mask=there, eviction_policy="evict_last")


@triton.jit
def _adam(
    p, parts, m, v, step, scale, rate, new_p, new_m, new_v, lr, decay, first_decay, second_decay, epsilon,
    STRIDES: tl.constexpr, STARTS: tl.constexpr, BLOCKS: tl.constexpr, SCALED: tl.constexpr, RATED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes a block. The outputs may be the inputs."""
    block = tl.program_id(0).to(tl.int64)  # offsets in a vector of one part may need 64 bits
    address, start, size, first = _part_of(block, 0, parts, STRIDES, STARTS, BLOCKS, BLOCK)
    inside = first + tl.arange(0, BLOCK)
    there = inside < size
    at = start + inside
    count = tl.load(step).to(tl.float32)
    unbias_first = 1 - tl.exp2(count * tl.log2(first_decay))
    unbias_second = 1 - tl.exp2(count * tl.log2(second_decay))
    here = tl.load(p + at, mask=there, other=0.0)
    d = tl.load(address + inside, mask=there, other=0.0)
    if SCALED:
        d *= tl.load(scale)
    d += decay * here
    mean = first_decay * tl.load(m + at, mask=there, other=0.0) + (1 - first_decay) * d
    square = second_decay * tl.load(v + at, mask=there, other=0.0) + (1 - second_decay) * d * d
    change = (mean / unbias_first) / (tl.sqrt(square / unbias_second) + epsilon)
    if RATED:
        lr = tl.load(rate).to(tl.float32)
    tl.store(new_p + at, here - lr * change, mask=there)
    tl.store(new_m + at, mean, mask=there)
    tl.store(new_v + at, square, mask=there)


def join(parts: list[Tensor]) -> Tensor:
    """Join parts [c, ...], which have contiguous rows, to one vector for each client, [c, D]."""
    clients = len(parts[0])
    starts = _starts(parts)
    out = parts[0].new_empty((clients, starts[-1]))
    strides = tuple(part.stride(0) for part in parts)
    grid = (triton.cdiv(starts[-1], _BLOCK), clients)
    _join[grid](tuple(parts), strides, out, starts[-1], starts, BLOCK=_BLOCK, num_warps=4)
    return out


def sgd(
    theta: Tensor,
    velocity: Tensor | None,
    gradient: list[Tensor],
    active: Tensor | None,
    towards: Tensor | None,
    rate: Tensor | None,
    lr: float,
    momentum: float,
    decay: float,
    clip: float | None,
    proximal: float,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity [c, D] after one step of SGD.

    Args:
        theta: parameters [c, D], contiguous rows.
        velocity: [c, D], contiguous rows; None for zeros.
        gradient: parts [c, ...] of a gradient [c, D], contiguous rows.
        active: bool [c], whether the step changes a client's parameters; None for all clients.
        towards: θ₀ [c, D] of the proximal term, contiguous rows; None for no such term.
        rate: [c], learning rates; None for `lr`.
        lr: learning rate.
        momentum: factor of the old velocity.
        decay: weight decay.
        clip: maximum norm of the gradient; None for no clipping.
        proximal: μ, weight of the proximal term.
        in_place: whether to overwrite `theta` and `velocity`, which must not be None.
    """
    clients = len(theta)
    parts, layout = tuple(gradient), _layout(gradient)
    blocks = layout["BLOCKS"][-1]
    shares = max(1, min(blocks, _MOST_SHARES))  # must not depend on the number of clients, for equal rounding
    if in_place:
        new_theta, new_velocity = theta, velocity
    else:
        new_theta, new_velocity = theta.new_empty(theta.shape), theta.new_empty(theta.shape)
    partial = theta
    if clip is not None:
        partial = theta.new_empty((clients, shares))
        _squares[(shares, clients)](parts, partial, **layout, SHARES=shares, BLOCK=_BLOCK, num_warps=4)
    _sgd[(blocks, clients)](
        theta, theta if velocity is None else velocity, parts, partial, theta if active is None else active,
        theta if towards is None else towards, theta if rate is None else rate, new_theta, new_velocity, lr, momentum,
        decay, 0.0 if clip is None else clip, proximal, ST=theta.stride(0),
        SV=0 if velocity is None else velocity.stride(0), SA=0 if towards is None else towards.stride(0),
        SR=0 if rate is None else rate.stride(0), SNT=new_theta.stride(0), SNV=new_velocity.stride(0), **layout,
        MOVING=velocity is not None, CLIP=clip is not None, MASKED=active is not None, PULLED=towards is not None,
        RATED=rate is not None, SHARES=shares, WIDE=triton.next_power_of_2(shares), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return new_theta, new_velocity


def norm(parts: list[Tensor]) -> Tensor:
    """Return the norm [] of all parts joined to one vector. Parts are contiguous and have any shapes."""
    rows = [part.unsqueeze(0) for part in parts]
    layout = _layout(rows)
    shares = max(1, min(layout["BLOCKS"][-1], _MOST_SHARES_ALONE))
    partial = parts[0].new_empty((1, shares))
    _squares[(shares, 1)](tuple(rows), partial, **layout, SHARES=shares, BLOCK=_BLOCK, num_warps=4)
    return partial.sum().sqrt()


def adam(
    parameters: Tensor,
    gradient: list[Tensor],
    first: Tensor,
    second: Tensor,
    step: Tensor,
    scale: Tensor | None,
    rate: Tensor | None,
    lr: float,
    decay: float,
    first_decay: float,
    second_decay: float,
    epsilon: float,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameters and both moments [D] after one step of Adam.

    All tensors are contiguous; the gradient is in parts of any shapes.
    """
    rows = [part.unsqueeze(0) for part in gradient]
    layout = _layout(rows)
    old = (parameters, first, second)
    new = old if in_place else tuple(torch.empty_like(part) for part in old)
    _adam[(layout["BLOCKS"][-1],)](
        parameters, tuple(rows), first, second, step, step if scale is None else scale, step if rate is None else rate,
        *new, lr, decay, first_decay, second_decay, epsilon, **layout, SCALED=scale is not None,
        RATED=rate is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return new


def _layout(parts: list[Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the constants of `_part_of` for parts [c, ...] with contiguous rows."""
    blocks = accumulate((triton.cdiv(part[0].numel(), _BLOCK) for part in parts), initial=0)
    return {
        "STRIDES": tuple(part.stride(0) for part in parts),
        "STARTS": _starts(parts),
        "BLOCKS": tuple(blocks),
    }


def _starts(parts: list[Tensor]) -> tuple[int, ...]:
    """Return the start of each part [c, ...] in a client's vector, and the vector's length."""
    return tuple(accumulate((part[0].numel() for part in parts), initial=0))
