"""Layers with what usually follows them as one operation: convolution, pooling and ReLU; linear layer and ReLU.

Each is written for one client. `torch.func` transforms and ordinary autograd both take them. On a GPU, mapped over
many clients, each is one kernel for all of them where `client_axis` has one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pefll.backend import client_axis, hypernet_linear
from pefll.backend.alone import alone
from pefll.backend.geometry import Geometry, Pair
from pefll.backend.native import pooled
from pefll.core.reference import fast
from pefll.data.client import Batch
from pefll.methods import contract
from pefll.tasks import Classification, Task

# weight, bias, stride, padding, dilation, groups, relu, pool
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
        feeds_convolution: whether another convolution may come next. Kernels like channels innermost in memory; what
            else may come, such as `flatten`, would copy them.
        following: the next convolution, if the output is for nothing else: it may then be of the type that this reads.

    Returns:
        [b, co, h', w'].
    """
    if client_axis.convolves(x, weight, stride, padding, dilation, groups, pool):
        numbers = (_side(stride), _side(padding), pool, relu)
        bf16_out = feeds_convolution and following is not None and _passes_bf16(x, weight, *numbers[:3], following)
        return client_axis.convolve(x, weight, bias, *numbers, channels_first=not feeds_convolution, bf16_out=bf16_out)
    if _is_alone_on_cpu(x):
        return _chain_on_cpu(x, ((weight, bias, stride, padding, dilation, groups, relu, pool),), feeds_convolution)
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    # The largest of some values, cut at 0, is the largest of the values cut at 0: pooling first leaves less to cut.
    if pool > 1:
        y = F.max_pool2d(y, pool)
    return F.relu(y) if relu else y


def conv_chain(x: Tensor, blocks: tuple[ConvBlock, ...], feeds_convolution: bool = False) -> Tensor:
    """Return what several `conv_block`, one after another, make of x.

    Args:
        x: [b, ci, h, w].
        blocks: all arguments of each but its input.
        feeds_convolution: whether yet another convolution comes after the last, once a shortcut is added, say.

    Returns:
        [b, co, h', w'].
    """
    if _is_alone_on_cpu(x):
        return _chain_on_cpu(x, blocks, True)
    for block, following in zip(blocks, (*blocks[1:], None), strict=True):
        x = conv_block(x, *block, following is not None or feeds_convolution, following)
    return x


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
    if client_axis.multiplies(x, weight):
        return client_axis.linear(x, weight, bias, relu)
    y = hypernet_linear.linear(x, weight, bias) if hypernet_linear.takes(x, weight) else F.linear(x, weight, bias)
    return F.relu(y) if relu else y


def _is_cross_entropy(task: Task, output: Tensor, batch: Batch) -> bool:
    return type(task) is Classification and client_axis.available(output)


@fast(contract.mean_loss, when=_is_cross_entropy)
def cross_entropy(task: Task, output: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of samples, []."""
    return client_axis.cross_entropy(output, batch.y, batch.weight)


def _passes_bf16(x: Tensor, weight: Tensor, stride: int, padding: int, pool: int, following: ConvBlock) -> bool:
    """Whether a convolution of x may hand bfloat16 numbers to the next one: both would round them to that."""
    shape = client_axis.output_shape(x, weight, stride, padding, pool)
    next_weight, _, next_stride, next_padding, dilation, groups, _, next_pool = following
    reads = client_axis.reads_bf16(shape, next_weight, next_stride, next_padding, dilation, groups, next_pool)
    return reads and client_axis.writes_bf16(x, weight, stride, padding, pool)


def _side(pair: Pair) -> int:
    return pair if isinstance(pair, int) else pair[0]


def _is_alone_on_cpu(x: Tensor) -> bool:
    """Whether x is one client's own batch, which may have any layout in memory, of a type that oneDNN is fast for."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == 4 and len(x) > 0 and alone()


def _chain_on_cpu(x: Tensor, blocks: tuple[ConvBlock, ...], feeds_convolution: bool) -> Tensor:
    """Return the same as `conv_chain`, in the layout of memory that is fastest on a CPU; for first derivatives only."""
    # Where something is pooled, our own kernels, if there is a compiler, or else oneDNN's layout: its pooling keeps no
    # table of 64-bit indices. Both pass over NaN, which torch's pooling would hand on; but samples are finite, and
    # weights that are not are seen when a client replies with them. One convolution before something else stays as it
    # lies, and all others have the channels innermost.
    pools = any(block[-1] > 1 for block in blocks)
    native = pools and _is_native(x, blocks)
    opaque = pools and not native and _has_onednn()
    innermost = (feeds_convolution or native) and not opaque
    x = x.to_mkldnn() if opaque else x
    for block in blocks:
        weight, bias, stride, padding, dilation, groups, relu, pool = block
        if native and pool > 1:
            x = pooled.convolve(x, weight, bias, _geometry(x.shape, block))
            continue
        broken = not opaque and _is_broken_innermost(weight, stride)
        x = _channels_first(x) if broken else _channels_last(x) if innermost else x
        filters = _channels_last(weight) if innermost and not broken else weight
        x = F.conv2d(x, filters, bias, stride, padding, dilation, groups)
        x = F.max_pool2d(x, pool, pool) if pool > 1 else x
        x = F.relu(x) if relu else x
    return x.to_dense() if opaque else x


def _is_native(x: Tensor, blocks: tuple[ConvBlock, ...]) -> bool:
    """Whether our own kernels take all blocks that pool something, as they are and for pictures of this size."""
    shape = x.shape
    for block in blocks:
        weight, bias, stride, padding, dilation, groups, _, pool = block
        alike = all(len(set(_both(pair))) == 1 for pair in (stride, padding))
        if not alike or _both(dilation) != (1, 1) or groups != 1 or torch.is_autocast_enabled("cpu"):
            return False
        if weight.shape[1] != shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
            return False  # torch says what is wrong
        s = _geometry(shape, block)
        if pool > 1 and not pooled.takes(s, x, weight, bias):
            return False
        shape = torch.Size((shape[0], s.co, s.ph, s.pw))
    return True


def _geometry(shape: torch.Size, block: ConvBlock) -> Geometry:
    """Return the numbers of a block whose input has this shape, [b, ci, h, w]."""
    weight, _, stride, padding, _, _, relu, pool = block
    _, channels, rows, columns = shape
    co, _, kh, kw = weight.shape
    return Geometry(channels, rows, columns, co, kh, kw, _side(stride), _side(padding), pool, relu)


def _both(pair: Pair) -> tuple[int, ...]:
    return (pair, pair) if isinstance(pair, int) else tuple(pair) * (3 - len(pair))


def _has_onednn() -> bool:
    """Whether torch was built with oneDNN, nobody has switched it off, and no autocast gives it another type."""
    here: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return here and torch._C._get_mkldnn_enabled() and not torch.is_autocast_enabled("cpu")


def _is_broken_innermost(weight: Tensor, stride: Pair) -> bool:
    """Whether oneDNN would write beyond its memory with the channels innermost, as it does on CPUs with AVX2.

    It does so in the backward pass of 1x1 convolutions with strides, where the channels do not fill its registers.
    """
    strided = stride != 1 if isinstance(stride, int) else any(step != 1 for step in stride)
    return strided and weight.shape[2:] == (1, 1) and weight.shape[1] % 8 != 0


def _channels_first(x: Tensor) -> Tensor:
    """Return the same numbers [b, c, h, w] with the channels outermost in memory; no copy where they are already."""
    # Of one channel the strides have to say so, for they are what torch goes by.
    return x.squeeze(1).contiguous().unsqueeze(1) if x.shape[1] == 1 else x.contiguous()


def _channels_last(x: Tensor) -> Tensor:
    """Return the same numbers [b, c, h, w] with the channels innermost in memory; no copy where they are already."""
    if x.shape[1] == 1:
        # One channel is innermost and outermost at once: only the strides have to say so.
        return x.reshape(x.shape[0], x.shape[2], x.shape[3], 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)
