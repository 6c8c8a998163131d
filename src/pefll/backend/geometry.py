"""The numbers that describe one convolution with what follows it."""

from __future__ import annotations

from typing import NamedTuple

Pair = int | tuple[int, int]


class Geometry(NamedTuple):
    """A convolution, max-pooling and ReLU.

    Attributes:
        ci: input channels.
        h: input rows.
        w: input columns.
        co: output channels.
        kh: rows of the kernel.
        kw: columns of the kernel.
        stride: of the convolution, both ways.
        padding: of the convolution, on all four sides.
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

    @property
    def wh(self) -> int:
        """Rows of the input that one pooled output looks at."""
        return (self.pool - 1) * self.stride + self.kh

    @property
    def ww(self) -> int:
        """Columns of the input that one pooled output looks at."""
        return (self.pool - 1) * self.stride + self.kw

    @property
    def ph(self) -> int:
        """Output rows, after pooling."""
        return ((self.h + 2 * self.padding - self.kh) // self.stride + 1) // self.pool

    @property
    def pw(self) -> int:
        """Output columns, after pooling."""
        return ((self.w + 2 * self.padding - self.kw) // self.stride + 1) // self.pool

    @property
    def routed(self) -> bool:
        """Whether some of the convolution's outputs get no gradient."""
        return self.relu or self.pool > 1
