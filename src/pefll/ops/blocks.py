"""Layers with what usually follows them as one operation: convolution, pooling and ReLU; linear layer and ReLU.

Each is written for one client. `torch.func` transforms and ordinary autograd both take them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pefll.ops.alone import alone

Pair = int | tuple[int, int]


def conv_block(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    relu: bool,
    pool: int,
) -> Tensor:
    """Return a convolution of x, max-pooled, with ReLU.

    Args:
        x: [b, ci, h, w].
        weight: [co, ci / groups, kh, kw].
        bias: [co], or None.
        stride: of the convolution.
        padding: of the convolution, with zeros.
        dilation: of the convolution.
        groups: of the convolution.
        relu: whether negative values become 0.
        pool: side of the pooled squares, which do not overlap; what is left over at the border is dropped. 1 for none.

    Returns:
        [b, co, h', w'].
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == 4 and len(x) and alone():
        return _conv_block_of_cpu(x, weight, bias, stride, padding, dilation, groups, relu, pool)
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    # The largest of some values, cut at 0, is the largest of the values cut at 0: pooling first leaves less to cut.
    if pool > 1:
        y = F.max_pool2d(y, pool)
    return F.relu(y) if relu else y


def _conv_block_of_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    relu: bool,
    pool: int,
) -> Tensor:
    """Return the same for one client alone on a CPU, in the layout of memory that is fastest there."""
    if pool > 1 and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        # oneDNN's own layout, in which its pooling needs no table of 64-bit indices.
        y = F.conv2d(x.to_mkldnn(), weight, bias, stride, padding, dilation, groups)
        y = F.max_pool2d(y, pool, pool).to_dense()
    else:
        # With the channels innermost. What comes out has that layout too, so of several blocks in a row only the first
        # one copies its input.
        y = F.conv2d(_channels_last(x), _channels_last(weight), bias, stride, padding, dilation, groups)
        y = F.max_pool2d(y, pool) if pool > 1 else y
    return F.relu(y) if relu else y


def linear_block(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return a linear layer of x, with ReLU.

    Args:
        x: [b, i]; more axes in front are allowed.
        weight: [o, i].
        bias: [o], or None.
        relu: whether negative values become 0.

    Returns:
        [b, o].
    """
    y = F.linear(x, weight, bias)
    return F.relu(y) if relu else y


def _channels_last(x: Tensor) -> Tensor:
    """Return the same numbers [b, c, h, w] with the channels innermost in memory; no copy where they are already."""
    if x.shape[1] == 1:
        # One channel is innermost and outermost at once: only the strides have to say so.
        return x.reshape(x.shape[0], x.shape[2], x.shape[3], 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)
