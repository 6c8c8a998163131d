"""Triton kernels for linear layers with few rows and very many outputs, forward and backward.

The last layer of a hypernetwork has about a hundred inputs, a few rows (clients), and an output for every parameter of
a client's model. Memory limits the speed, so each pass reads the weights only once and writes their gradient only once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pefll.backend.kernels.tiles import SMALLEST

# The sum over all outputs is split into this many partial sums: three for each multiprocessor of an H200. The number is
# the same on every GPU, so that all GPUs get the same bits.
_PROGRAMS = 396


@triton.jit
def _forward(
    x, w, bias, y, ROWS, OUT: tl.constexpr, IN: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BR: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Each program computes a block of outputs for all rows."""
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    i, r = tl.arange(0, BI), tl.arange(0, BR)
    a = tl.load(x + r[None, :] * IN + i[:, None], mask=(r < ROWS)[None, :] & (i < IN)[:, None], other=0.0)
    f = tl.load(w + o[:, None] * IN + i[None, :], mask=(o < OUT)[:, None] & (i < IN)[None, :], other=0.0)
    total = tl.dot(f, a, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + o, mask=o < OUT, other=0.0)[:, None]
    tl.store(y + r[None, :] * OUT + o[:, None], total, mask=(r < ROWS)[None, :] & (o < OUT)[:, None])


@triton.jit
def _weight_gradient(
    g, x, dw, db, ROWS, OUT: tl.constexpr, IN: tl.constexpr, MOST: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr
):  # fmt: skip
    """Each program computes the gradients for a block of outputs, from all rows. So few rows need no tensor cores."""
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    i = tl.arange(0, BI)
    total, of_bias = tl.zeros([BO, BI], tl.float32), tl.zeros([BO], tl.float32)
    for r in tl.static_range(MOST):  # unrolled, so that the loads of all rows overlap
        d = tl.load(g + r * OUT + o, mask=(o < OUT) & (r < ROWS), other=0.0)
        a = tl.load(x + r * IN + i, mask=(i < IN) & (r < ROWS), other=0.0)
        total += d[:, None] * a[None, :]
        of_bias += d
    tl.store(dw + o[:, None] * IN + i[None, :], total, mask=(o < OUT)[:, None] & (i < IN)[None, :])
    tl.store(db + o, of_bias, mask=o < OUT)


@triton.jit
def _input_gradient(
    g, w, shares, ROWS, OUT: tl.constexpr, IN: tl.constexpr, PRECISION: tl.constexpr, PROGRAMS: tl.constexpr,
    BR: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """Each program adds every PROGRAMS-th block of outputs, for all rows, and writes that partial sum."""
    i, r = tl.arange(0, BI), tl.arange(0, BR)
    total = tl.zeros([BR, BI], tl.float32)
    for turn in range(0, OUT, PROGRAMS * BO):
        o = turn + tl.program_id(0) * BO + tl.arange(0, BO)
        d = tl.load(g + r[:, None] * OUT + o[None, :], mask=(r < ROWS)[:, None] & (o < OUT)[None, :], other=0.0)
        f = tl.load(w + o[:, None] * IN + i[None, :], mask=(o < OUT)[:, None] & (i < IN)[None, :], other=0.0)
        total = tl.dot(d, f, total, input_precision=PRECISION)
    at = (tl.program_id(0) * ROWS + r)[:, None] * IN + i[None, :]
    tl.store(shares + at, total, mask=(r < ROWS)[:, None] & (i < IN)[None, :])


def forward(x: Tensor, w: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """Return the layer's output [r, o].

    Args:
        x: [r, i], contiguous.
        w: [o, i], contiguous.
        bias: [o], contiguous, or None.
        precision: precision of products: tf32x3 or tf32.
    """
    rows, inputs = x.shape
    outputs = len(w)
    y = x.new_empty((rows, outputs))
    sides = _sides(rows, inputs)
    _forward[(triton.cdiv(outputs, sides["BO"]),)](
        x, w, x if bias is None else bias, y, rows, outputs, inputs, bias is not None, precision, **sides, num_warps=4
    )
    return y


def input_gradient(g: Tensor, w: Tensor, precision: str) -> Tensor:
    """Return the gradient of x, [r, i].

    Args:
        g: gradient of the output, [r, o], contiguous.
        w: [o, i], contiguous.
        precision: precision of products.
    """
    rows, (outputs, inputs) = len(g), w.shape
    sides = _sides(rows, inputs)
    shares = w.new_empty((min(_PROGRAMS, triton.cdiv(outputs, sides["BO"])), rows, inputs))
    _input_gradient[(len(shares),)](
        g, w, shares, rows, outputs, inputs, precision, len(shares), **sides, num_warps=4, num_stages=3
    )
    return shares.sum(dim=0)


def weight_gradient(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of w [o, i] and bias [o].

    Args:
        g: gradient of the output, [r, o], contiguous.
        x: [r, i], contiguous.
    """
    (rows, inputs), outputs = x.shape, g.shape[1]
    dw, db = x.new_empty((outputs, inputs)), x.new_empty(outputs)
    sides = _sides(rows, inputs)
    few = sides["BO"] // 2
    _weight_gradient[(triton.cdiv(outputs, few),)](
        g, x, dw, db, rows, outputs, inputs, MOST=triton.next_power_of_2(rows), BI=sides["BI"], BO=few, num_warps=4
    )
    return dw, db


def _sides(rows: int, inputs: int) -> dict[str, int]:
    """Return the tile sizes: all rows, all inputs, and as many outputs as fit into registers."""
    bi = max(SMALLEST, triton.next_power_of_2(inputs))
    return {"BR": max(SMALLEST, triton.next_power_of_2(rows)), "BI": bi, "BO": max(SMALLEST, min(64, 8192 // bi))}
