"""How exact products of float32 numbers are on a GPU: one setting for the kernels of this package.

A tensor core multiplies numbers rounded to TF32 (10 bits after the point) or bfloat16 (7 bits). Three TF32 products of
the parts of two numbers give their float32 product to its last bits, so that `float32` needs no slower hardware.
"""

from __future__ import annotations

PRODUCTS = {"float64": "tf32x3", "float32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}
_current = "float32"


def use(precision: str) -> str:
    """Let kernels multiply with this precision from now on; return the one before."""
    global _current
    before, _current = _current, precision
    return before


def current() -> str:
    """Return the precision that kernels multiply with."""
    return _current


def products() -> str:
    """Return how kernels are to multiply: tf32x3, tf32 or bf16."""
    return PRODUCTS[_current]
