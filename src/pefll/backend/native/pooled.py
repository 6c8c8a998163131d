"""Convolution, max-pooling, bias and ReLU in one CPU kernel, for one client; see pooled.c."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pefll.backend.geometry import Geometry
from pefll.backend.native.compiler import library
from pefll.core.errors import PefllError

LANES = 16  # floats in the widest vector register
SLACK = LANES  # floats that kernels may read beyond the end of a picture
MOST_POOL = 15  # limit for the side of a pooling window, because one byte says where its maximum is (the route)
MOST_WINDOW = 1 << 11  # limit in floats; a filter and a window of this size fit into the L1 cache
MOST_PICTURE = 1 << 16  # limit in floats, with padding
MOST_FILTERS = 1 << 10
PROBE = Geometry(1, 6, 6, 1, 3, 3, 1, 0, 2, True)  # a small convolution, to test the compiler


@cache
def works() -> bool:
    """Return whether kernels can be compiled here. The answer is cached, and forked processes inherit it."""
    return library("pooled.c", _constants(PROBE)) is not None


def takes(s: Geometry, *given: Tensor | None) -> bool:
    """Return whether the kernels support this convolution and are faster than torch.

    Args:
        s: the sizes.
        given: input, weights and bias, or some of these three.
    """
    small = s.ci * s.kh * s.kw <= MOST_WINDOW and (s.h + 2 * s.padding) * (s.w + 2 * s.padding) * s.ci <= MOST_PICTURE
    if not (1 < s.pool <= MOST_POOL and small and s.co <= MOST_FILTERS and s.ph > 0 and s.pw > 0):
        return False
    # torch cannot trace or count a C kernel. `_is_plain` also excludes fake tensors and subclasses.
    if torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(one is None or _is_plain(one) for one in given) and works()


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu"


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, s: Geometry) -> Tensor:
    """Return outputs [b, co, ph, pw], with channels innermost in memory. All tensors are float32.

    Args:
        x: [b, ci, h, w], in any layout.
        weight: [co, ci, kh, kw].
        bias: [co], or None.
        s: the sizes.
    """
    result: Tensor = _Pooled.apply(x, weight, bias, s)  # type: ignore[no-untyped-call]
    return result


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, s: Geometry) -> Tensor:
        kernels = _kernels(_constants(s))
        nhwc, filters = _as_nhwc(x, s, kernels), weight.contiguous()
        start = None if bias is None else bias.contiguous()
        outputs = _empty_nhwc(len(x), s.ph, s.pw, s.co)
        route = torch.empty((len(x), s.ph, s.pw, s.co), dtype=torch.uint8)
        buffer = torch.empty((s.kh * s.kw * s.ci + 1 + s.pool * s.pw * s.pool) * _round_up(s.co))
        _call(kernels.convolve, (nhwc, filters, start, outputs, route, buffer), len(x), *_sides(s))
        ctx.save_for_backward(nhwc, filters, route)
        ctx.s, ctx.kernels = s, kernels
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        nhwc, filters, route = ctx.saved_tensors
        s: Geometry = ctx.s
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        g_nhwc = g.permute(0, 2, 3, 1).contiguous()
        dx = _empty_nhwc(len(g), *_sides(s)[:2], s.ci) if of_x else None
        dw, db = torch.empty_like(filters), torch.empty(s.co)
        buffer = torch.empty(2 * (s.co * s.kh * _round_up(s.kw * s.ci) + s.ph * s.pw + 1))
        _call(ctx.kernels.convolve_backward, (g_nhwc, route, nhwc, filters, dx, dw, db, buffer), len(g), *_sides(s))
        if dx is not None and s.padding:
            dx = dx[:, :, s.padding : -s.padding, s.padding : -s.padding]
        return dx, dw if of_weight else None, db if of_bias else None, None


def _as_nhwc(x: Tensor, s: Geometry, kernels: ctypes.CDLL) -> Tensor:
    """Return x with padding, and with channels innermost: x itself if possible, else a copy."""
    strides = (s.h * s.w * s.ci, 1, s.w * s.ci, s.ci)
    beyond = x.untyped_storage().nbytes() // 4 - x.storage_offset() - x.numel()
    if s.padding == 0 and x.stride() == strides and beyond >= SLACK:
        return x
    nhwc = _empty_nhwc(len(x), *_sides(s)[:2], s.ci)
    _call(kernels.to_nhwc, (x, nhwc), len(x), s.h, s.w, s.padding, *x.stride())
    return nhwc


def _empty_nhwc(samples: int, rows: int, columns: int, channels: int) -> Tensor:
    """Return uninitialised pictures [b, c, h, w] with channels innermost, followed in memory by SLACK floats."""
    line = columns * channels
    buffer = torch.empty(samples * rows * line + SLACK)
    # The result must not be a view: autograd forbids in-place activations on a view that a function returns.
    size, strides = (samples, channels, rows, columns), (rows * line, 1, line, channels)
    return torch.empty(0).set_(buffer.untyped_storage(), 0, size, strides)


def _sides(s: Geometry) -> tuple[int, int, int, int]:
    """Return the rows and columns of the padded input, then of the output."""
    return s.h + 2 * s.padding, s.w + 2 * s.padding, s.ph, s.pw


def _round_up(numbers: int) -> int:
    """Return a number of floats, rounded up to whole vectors."""
    return -(-numbers // LANES) * LANES


def _call(kernel: Any, tensors: tuple[Tensor | None, ...], *numbers: int) -> None:
    """Call a kernel with the addresses of the tensors, followed by the numbers."""
    kernel(*(None if each is None else each.data_ptr() for each in tensors), *numbers)
    # Use the tensors after the call, so that torch.compile does not free one before the kernel ends.
    assert tensors


def _constants(s: Geometry) -> tuple[tuple[str, int], ...]:
    names = {"CI": s.ci, "CO": s.co, "KH": s.kh, "KW": s.kw, "STRIDE": s.stride, "POOL": s.pool, "RELU": int(s.relu)}
    return tuple(names.items())


@cache
def _kernels(constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    made = library("pooled.c", constants)
    if made is None:  # without a fallback: a process that used torch instead would give other results
        raise PefllError(
            "the C compiler failed (a full disk?); try again, or set PEFLL_CC=none to use no compiler",
            code="PEFLL-E005",
        )
    address, number = ctypes.c_void_p, ctypes.c_long
    made.to_nhwc.argtypes = [address] * 2 + [number] * 8
    made.convolve.argtypes = [address] * 6 + [number] * 5
    made.convolve_backward.argtypes = [address] * 8 + [number] * 5
    for kernel in (made.to_nhwc, made.convolve, made.convolve_backward):
        kernel.restype = None
    return made
