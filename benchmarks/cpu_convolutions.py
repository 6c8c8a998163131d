"""Compares implementations of LeNet's two convolutions with pooling and ReLU on a CPU, forward and backward.

The implementations take turns in one process with one thread. The table has medians of ratios. `pefll.backend.blocks`
has the implementation that we use; docs/LOG.md describes the others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pefll.backend.blocks import conv_block
from pefll.engines.settings import keep_freed_memory, set_for_engines

Block = Callable[[Tensor, Tensor, Tensor], Tensor]
STEPS = 5


def as_written(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolution, ReLU, pooling, with channels outermost, as in a textbook."""
    return F.max_pool2d(F.relu(F.conv2d(x, weight, bias)), 2)


def pooled_first(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolution, pooling, ReLU."""
    return F.relu(F.max_pool2d(F.conv2d(x, weight, bias), 2))


def channels_last(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same with channels innermost."""
    last = torch.channels_last
    return pooled_first(x.contiguous(memory_format=last), weight.contiguous(memory_format=last), bias)


class _OneFunction(torch.autograd.Function):
    """Keeps only the pooled values and their positions, and frees the convolution's output at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.conv2d(x, weight, bias)
        pooled, places = torch.ops.aten.max_pool2d_with_indices.default(y, [2, 2], [2, 2])
        pooled.relu_()
        ctx.save_for_backward(x, weight, pooled, places)
        ctx.shape = y.shape
        return pooled  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, d_pooled: Tensor) -> Any:
        x, weight, pooled, places = ctx.saved_tensors
        aten = torch.ops.aten
        d_pooled = aten.threshold_backward.default(d_pooled, pooled, 0)
        y = torch.empty(ctx.shape, memory_format=torch.channels_last)
        d_y = aten.max_pool2d_with_indices_backward.default(d_pooled, y, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
        needed = [ctx.needs_input_grad[0], True, True]
        return aten.convolution_backward.default(
            d_y, x, weight, [len(weight)], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, needed
        )


def one_function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """All operations as one autograd node, with channels innermost."""
    last = torch.channels_last
    y: Tensor = _OneFunction.apply(  # type: ignore[no-untyped-call]
        x.contiguous(memory_format=last), weight.contiguous(memory_format=last), bias
    )
    return y


class _ComparedViews(torch.autograd.Function):
    """Pools by comparing columns, then rows; ties are resolved as in torch's pooling."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        y = y.permute(0, 2, 3, 1)
        columns = torch.maximum(y[:, :, 0::2], y[:, :, 1::2])
        pooled = torch.maximum(columns[:, 0::2], columns[:, 1::2]).relu_()
        ctx.save_for_backward(y, columns, pooled)
        return pooled.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, d_pooled: Tensor) -> Tensor:
        y, columns, pooled = ctx.saved_tensors
        d_pooled = torch.ops.aten.threshold_backward.default(d_pooled.permute(0, 2, 3, 1), pooled, 0)
        d_columns, d_y = torch.empty_like(columns), torch.empty_like(y)
        torch.mul(d_pooled, columns[:, 0::2] >= columns[:, 1::2], out=d_columns[:, 0::2])
        torch.sub(d_pooled, d_columns[:, 0::2], out=d_columns[:, 1::2])
        torch.mul(d_columns, y[:, :, 0::2] >= y[:, :, 1::2], out=d_y[:, :, 0::2])
        torch.sub(d_columns, d_y[:, :, 0::2], out=d_y[:, :, 1::2])
        return d_y.permute(0, 3, 1, 2)


def compared_views(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Pooling by comparisons of strided views, with channels innermost."""
    last = torch.channels_last
    y = F.conv2d(x.contiguous(memory_format=last), weight.contiguous(memory_format=last), bias)
    pooled: Tensor = _ComparedViews.apply(y)  # type: ignore[no-untyped-call]
    return pooled


def kept(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The block of this package: oneDNN's layout inside, plain tensors as input and output."""
    return conv_block(x, weight, bias, 1, 0, 1, 1, True, 2)


def opaque(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same as `kept`, but with oneDNN's layout also between the two blocks, as in a chain of blocks."""
    return F.relu(F.max_pool2d(F.conv2d(x if x.is_mkldnn else x.to_mkldnn(), weight, bias), 2, 2))


WAYS: tuple[Block, ...] = (as_written, pooled_first, channels_last, one_function, compared_views, kept, opaque)


def main() -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=25)
    turns = parser.parse_args().turns
    set_for_engines("float32")
    keep_freed_memory(True)
    x, of_output = torch.randn(32, 3, 32, 32), torch.randn(32, 32, 5, 5)
    weights = [torch.randn(shape) / 10 for shape in ((16, 3, 5, 5), (16,), (32, 16, 5, 5), (32,))]
    leaves = [weight.requires_grad_() for weight in weights]
    seconds: dict[str, list[float]] = {way.__name__: [] for way in WAYS}
    for turn in range(turns + 1):
        for way in WAYS:
            started = time.process_time()
            for _ in range(STEPS):
                y = way(way(x, leaves[0], leaves[1]), leaves[2], leaves[3])
                torch.autograd.grad(y.to_dense() if y.is_mkldnn else y.contiguous(), leaves, of_output)
            if turn:
                seconds[way.__name__].append((time.process_time() - started) / STEPS)
    table = Table("", "CPU ms", "times as fast as written")
    for name, taken in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["as_written"], taken, strict=True))
        table.add_row(name.replace("_", " "), f"{1000 * statistics.median(taken):.2f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
