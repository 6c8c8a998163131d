"""A layer with its pooling and ReLU as one operation, written for one client.

These functions work with `torch.func` transforms and with ordinary autograd. If they are mapped over clients on a GPU,
one kernel of `client_axis` computes all clients, if there is such a kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pefll.backend import client_axis, hypernet_linear
from pefll.backend.alone import alone
from pefll.backend.geometry import Geometry, Pair, both, is_plain
from pefll.backend.native import pooled
from pefll.core.reference import fast
from pefll.data.client import Batch
from pefll.methods import contract
from pefll.tasks import Task
from pefll.tasks.classification import is_cross_entropy

# The arguments of a `conv_block` after x: weight, bias, stride, padding, dilation, groups, relu, pool.
ConvBlock = tuple[Tensor, Tensor | None, Pair, Pair, Pair, int, bool, int]


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
    feeds_convolution: bool = True,
    following: ConvBlock | None = None,
) -> Tensor:
    """Return the convolution of x [b, ci, h, w], max-pooled, with ReLU if `relu`, as [b, co, h', w'].

    `weight` is [co, ci / groups, kh, kw], and `bias` is [co] or None. `pool` is the side and stride of the pooling
    windows, 1 for no pooling. Incomplete windows at the border are dropped.

    `feeds_convolution` says whether another convolution may read the output. Kernels then put channels innermost in
    memory. Other readers, such as `flatten`, would have to copy such an output. `following` is the next convolution if
    nothing else reads the output. The output may then be bfloat16.
    """
    if client_axis.convolves(x, weight, stride, padding, dilation, groups, pool):
        s = Geometry.of(x.shape, weight, stride, padding, pool, relu)
        bf16_out = feeds_convolution and following is not None and _passes_bf16(x, weight, s, following)
        return client_axis.convolve(x, weight, bias, s, channels_first=not feeds_convolution, bf16_out=bf16_out)
    if _is_alone_on_cpu(x):
        return _chain_on_cpu(x, ((weight, bias, stride, padding, dilation, groups, relu, pool),), feeds_convolution)
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    # Max-pooling and ReLU commute. ReLU after pooling has fewer numbers to compute.
    if pool > 1:
        y = F.max_pool2d(y, pool)
    return F.relu(y) if relu else y


def conv_chain(x: Tensor, blocks: tuple[ConvBlock, ...], feeds_convolution: bool = False) -> Tensor:
    """Return the output [b, co, h', w'] of several `conv_block`, one after another, for x [b, ci, h, w].

    Args:
        x: [b, ci, h, w].
        blocks: the arguments of each block, without x.
        feeds_convolution: whether another convolution reads the output, for example after adding a shortcut.
    """
    if _is_alone_on_cpu(x):
        return _chain_on_cpu(x, blocks, True)
    for block, following in zip(blocks, (*blocks[1:], None), strict=True):
        x = conv_block(x, *block, following is not None or feeds_convolution, following)
    return x


def linear_block(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return a linear layer's output [..., o] for x [..., i], weight [o, i] and bias [o], with ReLU if `relu`."""
    if client_axis.multiplies(x, weight):
        return client_axis.linear(x, weight, bias, relu)
    y = hypernet_linear.linear(x, weight, bias) if hypernet_linear.takes(x, weight) else F.linear(x, weight, bias)
    return F.relu(y) if relu else y


def _is_cross_entropy(task: Task, output: Tensor, batch: Batch) -> bool:
    """Whether the loss is cross-entropy and has a kernel."""
    return is_cross_entropy(task) and client_axis.available(output)


@fast(contract.mean_loss, when=_is_cross_entropy)
def cross_entropy(task: Task, output: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross-entropy [] of a batch."""
    return client_axis.cross_entropy(output, batch.y, batch.weight)


def _passes_bf16(x: Tensor, weight: Tensor, s: Geometry, following: ConvBlock) -> bool:
    """Whether a convolution of x may write bfloat16. The next convolution would round to bfloat16 anyway."""
    shape = (len(x), s.co, s.ph, s.pw)
    next_weight, _, stride, padding, dilation, groups, _, pool = following
    reads = client_axis.reads_bf16(shape, next_weight, stride, padding, dilation, groups, pool)
    return reads and client_axis.writes_bf16(x, s)


def _is_alone_on_cpu(x: Tensor) -> bool:
    """Whether x is a float32 batch on a CPU, outside of transforms. Its memory layout may then be changed."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == 4 and len(x) > 0 and alone()


def _chain_on_cpu(x: Tensor, blocks: tuple[ConvBlock, ...], feeds_convolution: bool) -> Tensor:
    """Return the result of `conv_chain`, with the memory layout that is fastest on a CPU; no second derivatives."""
    # Blocks with pooling use our C kernels. Without a compiler they use oneDNN's own layout, whose pooling stores no
    # 64-bit indices. Both lose a NaN, which torch's pooling would pass on. That is safe: samples are finite, and an
    # engine checks the weights that a client returns. Other blocks have channels innermost. The layout does not change
    # for a single convolution that feeds no other one.
    pools = any(block[-1] > 1 for block in blocks)
    native = pools and _is_native(x, blocks)
    opaque = pools and not native and _has_onednn()
    innermost = (feeds_convolution or native) and not opaque
    x = x.to_mkldnn() if opaque else x
    for weight, bias, stride, padding, dilation, groups, relu, pool in blocks:
        if native and pool > 1:
            x = pooled.convolve(x, weight, bias, Geometry.of(x.shape, weight, stride, padding, pool, relu))
            continue
        broken = not opaque and _is_broken_innermost(weight, stride)
        x = _channels_first(x) if broken else _channels_last(x) if innermost else x
        filters = _channels_last(weight) if innermost and not broken else weight
        x = F.conv2d(x, filters, bias, stride, padding, dilation, groups)
        x = F.max_pool2d(x, pool, pool) if pool > 1 else x
        x = F.relu(x) if relu else x
    return x.to_dense() if opaque else x


def _is_native(x: Tensor, blocks: tuple[ConvBlock, ...]) -> bool:
    """Whether our C kernels support all blocks with pooling."""
    shape = x.shape
    for weight, bias, stride, padding, dilation, groups, relu, pool in blocks:
        if not is_plain(stride, padding, dilation, groups) or torch.is_autocast_enabled("cpu"):
            return False
        if weight.shape[1] != shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
            return False  # the shapes are wrong, and torch raises an error that says so
        s = Geometry.of(shape, weight, stride, padding, pool, relu)
        if pool > 1 and not pooled.takes(s, x, weight, bias):
            return False
        shape = torch.Size((shape[0], s.co, s.ph, s.pw))
    return True


def _has_onednn() -> bool:
    """Whether torch has oneDNN, oneDNN is switched on, and autocast is off."""
    here: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return here and torch._C._get_mkldnn_enabled() and not torch.is_autocast_enabled("cpu")


def _is_broken_innermost(weight: Tensor, stride: Pair) -> bool:
    """Whether oneDNN, with channels innermost, might write beyond its memory. It does so on CPUs with AVX2.

    It happens in the backward pass of strided 1x1 convolutions whose channels do not fill whole registers.
    """
    return both(stride) != (1, 1) and weight.shape[2:] == (1, 1) and weight.shape[1] % 8 != 0


def _channels_first(x: Tensor) -> Tensor:
    """Return x [b, c, h, w] with channels outermost in memory; x is copied only if needed."""
    # torch looks at the strides. For one channel `contiguous` may not change them, so remove and add that axis.
    return x.squeeze(1).contiguous().unsqueeze(1) if x.shape[1] == 1 else x.contiguous()


def _channels_last(x: Tensor) -> Tensor:
    """Return x [b, c, h, w] with channels innermost in memory; x is copied only if needed."""
    if x.shape[1] == 1:
        # One channel is innermost and outermost at once, so only the strides must change.
        return x.reshape(x.shape[0], x.shape[2], x.shape[3], 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)
