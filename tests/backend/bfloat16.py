"""Triton's interpreter with bfloat16: its own has the type, but cuts where a GPU rounds, and multiplies the bits."""

from __future__ import annotations

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

from pefll.backend.kernels import convolution

KINDS = (tl.bfloat16, tl.float32)
cast = interpreter.InterpreterBuilder.cast_impl
dot = interpreter.InterpreterBuilder.create_dot


def rounded(data):
    """Return the bits of the nearest bfloat16 numbers, of two as near the even one."""
    return torch.from_numpy(np.array(data, np.float32)).bfloat16().view(torch.uint16).numpy()


def widened(data):
    """Return the float32 numbers that bits of bfloat16 are."""
    return (np.asarray(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def cast_impl(self, source, to):
    """Return a tensor of another type."""
    before, after = source.dtype.scalar, to.scalar
    if before == after or before not in KINDS or after not in KINDS:
        return cast(self, source, to)
    convert = rounded if after == tl.bfloat16 else widened
    return interpreter.TensorHandle(convert(source.data).reshape(source.data.shape), after)


def create_dot(self, a, b, *rest):
    """Return a product, which is exact for factors of bfloat16, and added in float32."""
    wide = (cast_impl(self, part, tl.float32) if part.dtype.scalar == tl.bfloat16 else part for part in (a, b))
    return dot(self, *wide, *rest)


def teach(monkeypatch):
    """Let the interpreter know bfloat16, and convolutions use it there as they do on a GPU."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    kinds = {"bf16": torch.bfloat16}
    monkeypatch.setattr(convolution, "factor_type", lambda like, precision: kinds.get(precision, torch.float32))
