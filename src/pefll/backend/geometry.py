"""The sizes of one convolution with pooling and ReLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

Pair = int | tuple[int, int]


class Geometry(NamedTuple):
    """The sizes of a convolution, max-pooling and ReLU.

    Attributes:
        ci: input channels.
        h: input rows.
        w: input columns.
        co: output channels.
        kh: rows of the kernel.
        kw: columns of the kernel.
        stride: stride of the convolution, in rows and in columns.
        padding: padding of the convolution, on all four sides.
        pool: side and stride of the pooling windows; 1 for no pooling.
        relu: whether ReLU follows.
    """

    ci: int
    h: int
    w: int
    co: int
    kh: int
    kw: int
    stride: int
    padding: int
    pool: int
    relu: bool

    @classmethod
    def of(
        cls, shape: Sequence[int], weight: Tensor, stride: Pair, padding: Pair, pool: int, relu: bool = True
    ) -> Geometry:
        """Return the sizes for inputs of a shape [..., h, w] and weights [..., co, ci, kh, kw]."""
        co, ci, kh, kw = weight.shape[-4:]
        return cls(ci, shape[-2], shape[-1], co, kh, kw, both(stride)[0], both(padding)[0], pool, relu)

    @property
    def wh(self) -> int:
        """Number of input rows that one pooled output depends on."""
        return (self.pool - 1) * self.stride + self.kh

    @property
    def ww(self) -> int:
        """Number of input columns that one pooled output depends on."""
        return (self.pool - 1) * self.stride + self.kw

    @property
    def ph(self) -> int:
        """Number of output rows, after pooling."""
        return ((self.h + 2 * self.padding - self.kh) // self.stride + 1) // self.pool

    @property
    def pw(self) -> int:
        """Number of output columns, after pooling."""
        return ((self.w + 2 * self.padding - self.kw) // self.stride + 1) // self.pool

    @property
    def routed(self) -> bool:
        """Whether some outputs of the convolution get no gradient."""
        return self.relu or self.pool > 1


def both(pair: Pair) -> tuple[int, int]:
    """Return the values for rows and columns."""
    return (pair, pair) if isinstance(pair, int) else (pair[0], pair[-1])


def is_plain(stride: Pair, padding: Pair, dilation: Pair, groups: int) -> bool:
    """Whether stride and padding are the same in rows and columns, and there are no dilation and no groups."""
    square = all(len(set(both(pair))) == 1 for pair in (stride, padding))
    return square and both(dilation) == (1, 1) and groups == 1
