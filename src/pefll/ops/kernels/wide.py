"""Linear layers with few rows and very many outputs, forwards and backwards, as Triton kernels.

A hypernetwork's last layer is one: a hundred inputs, a handful of clients, and a parameter of their models for every
output. All that counts is that its weights come from memory once each way, and their gradient goes there once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pefll.ops.kernels.tiles import SMALLEST

# That the backward pass is split into: four for each processor of an H200. A number of its own on every card, so that
# the sum over all outputs has the same bits on all of them.
_PROGRAMS = 528


@triton.jit
def _forward(
    x, w, bias, y, OUT: tl.constexpr, ROWS: tl.constexpr, IN: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """One program has all rows, and some outputs."""
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    i, r = tl.arange(0, BI), tl.arange(0, BR)
    a = tl.load(x + r[None, :] * IN + i[:, None], mask=(r < ROWS)[None, :] & (i < IN)[:, None], other=0.0)
    f = tl.load(w + o[:, None] * IN + i[None, :], mask=(o < OUT)[:, None] & (i < IN)[None, :], other=0.0)
    total = tl.dot(f, a, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + o, mask=o < OUT, other=0.0)[:, None]
    tl.store(y + r[None, :].to(tl.int64) * OUT + o[:, None], total, mask=(r < ROWS)[None, :] & (o < OUT)[:, None])


@triton.jit
def _backward(
    g, x, w, shares, dw, db, OUT: tl.constexpr, ROWS: tl.constexpr, IN: tl.constexpr, PRECISION: tl.constexpr,
    PROGRAMS: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """One program has all rows, and every so manieth block of outputs; it writes its share of x's gradient."""
    i, r = tl.arange(0, BI), tl.arange(0, BR)
    real = (r < ROWS)[:, None] & (i < IN)[None, :]
    a = tl.load(x + r[:, None] * IN + i[None, :], mask=real, other=0.0)
    total = tl.zeros([BR, BI], tl.float32)
    for turn in range(0, OUT, PROGRAMS * BO):
        o = turn + tl.program_id(0) * BO + tl.arange(0, BO)
        valid = (o < OUT)[:, None] & (i < IN)[None, :]
        at = o[:, None] * IN + i[None, :]
        f = tl.load(w + at, mask=valid, other=0.0)
        d = tl.load(
            g + r[:, None].to(tl.int64) * OUT + o[None, :], mask=(r < ROWS)[:, None] & (o < OUT)[None, :], other=0.0
        )
        total = tl.dot(d, f, total, input_precision=PRECISION)
        tl.store(dw + at, tl.dot(tl.trans(d), a, input_precision=PRECISION), mask=valid)
        tl.store(db + o, tl.sum(d, axis=0), mask=o < OUT)
    tl.store(shares + (tl.program_id(0) * ROWS + r)[:, None] * IN + i[None, :], total, mask=real)


def forward(x: Tensor, w: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """Return [r, o].

    Args:
        x: [r, i], contiguous.
        w: [o, i], contiguous.
        bias: [o], contiguous, or None.
        precision: of products: tf32x3 or tf32.
    """
    rows, inputs = x.shape
    outputs = len(w)
    y = x.new_empty((rows, outputs))
    sides = _sides(rows, inputs)
    _forward[(triton.cdiv(outputs, sides["BO"]),)](
        x, w, x if bias is None else bias, y, outputs, rows, inputs, bias is not None, precision, **sides, num_warps=4
    )
    return y


def backward(g: Tensor, x: Tensor, w: Tensor, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x [r, i], w [o, i] and bias [o].

    Args:
        g: of the output, [r, o], contiguous.
        x: [r, i], contiguous.
        w: [o, i], contiguous.
        precision: of products.
    """
    rows, inputs = x.shape
    outputs = len(w)
    sides = _sides(rows, inputs)
    programs = min(_PROGRAMS, triton.cdiv(outputs, sides["BO"]))
    shares, dw, db = x.new_empty((programs, rows, inputs)), w.new_empty(w.shape), w.new_empty(outputs)
    _backward[(programs,)](
        g, x, w, shares, dw, db, outputs, rows, inputs, precision, programs, **sides, num_warps=4, num_stages=2
    )
    return shares.sum(dim=0), dw, db


def _sides(rows: int, inputs: int) -> dict[str, int]:
    """Return sides of tiles: all rows, all inputs, and as many outputs as registers hold with them."""
    wide = max(SMALLEST, triton.next_power_of_2(inputs))
    return {"BR": max(SMALLEST, triton.next_power_of_2(rows)), "BI": wide, "BO": max(SMALLEST, min(64, 8192 // wide))}
