"""Triton kernels for linear layers with a client axis, bias and ReLU, forward and backward."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pefll.backend.kernels.tiles import shrunk, side


@triton.jit
def _forward(
    x, w, bias, y, B, sx_c, sx_b, sw_c, sb_c, IN: tl.constexpr, OUT: tl.constexpr,
    RELU: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BB: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    x += client * sx_c
    w += client * sw_c
    total = tl.zeros([BB, BO], tl.float32)
    for i0 in range(0, IN, BI):
        i = i0 + tl.arange(0, BI)
        a = tl.load(x + b[:, None] * sx_b + i[None, :], mask=(b < B)[:, None] & (i < IN)[None, :], other=0.0)
        f = tl.load(w + o[None, :] * IN + i[:, None], mask=(o < OUT)[None, :] & (i < IN)[:, None], other=0.0)
        if PRECISION == "bf16":
            total = tl.dot(a.to(tl.bfloat16), f.to(tl.bfloat16), total)
        else:
            total = tl.dot(a, f, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + client * sb_c + o, mask=o < OUT, other=0.0)[None, :]
    if RELU:
        total = tl.where(total <= 0, 0.0, total)
    out = (client * B + b)[:, None] * OUT + o[None, :]
    tl.store(y + out, total, mask=(b < B)[:, None] & (o < OUT)[None, :])


@triton.jit
def _backward(
    g, y, x, w, dx, dw, db, B, sg_c, sg_b, sx_c, sx_b, sw_c, IN: tl.constexpr, OUT: tl.constexpr,
    RELU: tl.constexpr, INPUT: tl.constexpr, PRECISION: tl.constexpr,
    BB: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Each program writes the columns of dx and dw for a block of inputs, from all samples and outputs."""
    client = tl.program_id(1).to(tl.int64)
    b = tl.arange(0, BB)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    g += client * sg_c
    y += client * B * OUT
    w += client * sw_c
    a = tl.load(
        x + client * sx_c + b[:, None] * sx_b + i[None, :], mask=(b < B)[:, None] & (i < IN)[None, :], other=0.0
    )
    total = tl.zeros([BB, BI], tl.float32)
    for o0 in range(0, OUT, BO):
        o = o0 + tl.arange(0, BO)
        valid = (b < B)[:, None] & (o < OUT)[None, :]
        d = tl.load(g + b[:, None] * sg_b + o[None, :], mask=valid, other=0.0)
        if RELU:
            d = tl.where(tl.load(y + b[:, None] * OUT + o[None, :], mask=valid, other=0.0) > 0, d, 0.0)
        inside = (o < OUT)[:, None] & (i < IN)[None, :]
        if PRECISION == "bf16":
            change = tl.dot(tl.trans(d).to(tl.bfloat16), a.to(tl.bfloat16))
        else:
            change = tl.dot(tl.trans(d), a, input_precision=PRECISION)
        tl.store(dw + client * (OUT * IN) + o[:, None] * IN + i[None, :], change, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(db + client * OUT + o, tl.sum(d, axis=0), mask=o < OUT)
        if INPUT:
            f = tl.load(w + o[:, None] * IN + i[None, :], mask=inside, other=0.0)
            if PRECISION == "bf16":
                total = tl.dot(d.to(tl.bfloat16), f.to(tl.bfloat16), total)
            else:
                total = tl.dot(d, f, total, input_precision=PRECISION)
    if INPUT:
        out = (client * B + b)[:, None] * IN + i[None, :]
        tl.store(dx + out, total, mask=(b < B)[:, None] & (i < IN)[None, :])


def forward(x: Tensor, w: Tensor, bias: Tensor | None, relu: bool, precision: str) -> Tensor:
    """Return the layer's output [c, b, o].

    Args:
        x: [c, b, i], contiguous along i.
        w: [c, o, i], contiguous rows.
        bias: [c, o], or None.
        relu: whether ReLU follows.
        precision: precision of products: tf32x3, tf32 or bf16.
    """
    clients, samples, inputs = x.shape
    outputs = w.shape[1]
    y = x.new_empty((clients, samples, outputs))
    bb, bo, bi, warps, stages = _forward_tile(x, outputs, precision)
    grid = (triton.cdiv(outputs, bo), triton.cdiv(samples, bb), clients)
    _forward[grid](
        x, w, x if bias is None else bias, y, samples, x.stride(0), x.stride(1), w.stride(0),
        0 if bias is None else bias.stride(0), inputs, outputs, relu, bias is not None, precision,
        BB=bb, BO=bo, BI=bi, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def backward(
    g: Tensor, y: Tensor, x: Tensor, w: Tensor, relu: bool, wants_input: bool, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x [c, b, i] (empty if not wanted), w [c, o, i] and bias [c, o].

    Args:
        g: gradient of the output, [c, b, o], contiguous along o.
        y: the output, [c, b, o], contiguous; read only with ReLU.
        x: [c, b, i], contiguous along i. All samples of a client must fit into one tile.
        w: [c, o, i], contiguous rows.
        relu: whether ReLU followed.
        wants_input: whether the gradient of x is needed.
        precision: precision of products.
    """
    clients, samples, inputs = x.shape
    outputs = w.shape[1]
    dx = x.new_empty((clients, samples, inputs) if wants_input else (0,))
    dw = x.new_empty((clients, outputs, inputs))
    db = x.new_empty((clients, outputs))
    bo, bi, warps, stages = _backward_tile(x, outputs)
    grid = (triton.cdiv(inputs, bi), clients)
    _backward[grid](
        g, y, x, w, dx, dw, db, samples, g.stride(0), g.stride(1), x.stride(0), x.stride(1), w.stride(0),
        inputs, outputs, relu, wants_input, precision,
        BB=max(16, triton.next_power_of_2(samples)), BO=bo, BI=bi,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dx, dw, db


# Sizes of tiles (samples, outputs, inputs), warps and stages; see pefll.backend.kernels.convolution.


def _forward_tile(x: Tensor, outputs: int, precision: str) -> tuple[int, int, int, int, int]:
    clients, samples, inputs = x.shape
    many = clients * outputs > 16 * 264
    columns = 32 if many else 16
    at_once, deep, stages = shrunk(x, side(samples, 64), side(inputs, 128), columns, 4 if many else 3, precision)
    return at_once, columns, deep, 2 if many else 4, stages


def _backward_tile(x: Tensor, outputs: int) -> tuple[int, int, int, int]:
    clients, _, inputs = x.shape
    if clients * inputs > 64 * 132:
        return 16, 128, 4, 2
    if inputs <= 256:
        return side(outputs, 128), 32, 4, 2
    # The size of the block of inputs does not change how dw and dx are added. So it may depend on the total number of
    # clients of all runs. The order of db's sum depends on Triton's layout of the gradients. That layout stays the same
    # if the rows of the gradients are multiples of 32 bytes.
    return side(outputs, 64), 64 if outputs % 8 == 0 and clients * inputs > 64 * 132 else 32, 4, 2
