"""The precision with which our GPU kernels multiply float32 numbers: one setting for the whole process.

Tensor cores multiply numbers rounded to TF32 (10 bits after the point) or bfloat16 (7 bits). For `float32`, kernels
split each number into two TF32 numbers. The sum of three products of these is the float32 product to its last bits.
"""

from __future__ import annotations

PRODUCTS = {"float64": "tf32x3", "float32": "tf32x3", "tf32": "tf32", "bf16": "bf16"}
_current = "float32"


def use(precision: str) -> str:
    """Set the precision of kernels and return the previous one."""
    global _current
    before, _current = _current, precision
    return before


def current() -> str:
    """Return the precision of kernels."""
    return _current


def products() -> str:
    """Return how kernels multiply: tf32x3 (three TF32 products), tf32 or bf16."""
    return PRODUCTS[_current]
