"""Operations with a client axis: under `torch.func.vmap`, one kernel computes all clients.

A caller writes code for one client, and calls an autograd function for one client. That function calls a
`torch.library` operation, whose first axis is the client axis. The operation's vmap rule merges mapped axes into the
client axis. There are no second derivatives. The kernels are written in Triton, and in CUDA C++ for first layers. Other
devices, other types, and grouped or dilated convolutions have no kernels: `pefll.backend.blocks` uses torch for them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from pefll.backend.geometry import Geometry, Pair, both, is_plain
from pefll.backend.mapped import (
    NoSecondDerivative,
    apply,
    has_gradient,
    maybe_packed,
    merge_mapped_axis,
    packed,
    with_client_axis,
)
from pefll.backend.precision import products
from pefll.core.warning import warn

# Limits of `linear`, because its backward kernel loads a whole batch at once and loops over outputs. The last layer of
# a hypernetwork goes to `pefll.backend.hypernet_linear`, and other large layers go to cuBLAS.
MOST_SAMPLES, MOST_OUTPUTS = 128, 1024

# Kernels count the elements of one client's arrays with 32 bits. The second number limits the size of spread weights.
MOST_ELEMENTS, MOST_SPREAD = 1 << 31, 1 << 22

# Whether kernels also accept tensors on a CPU. For tests only: Triton's interpreter (TRITON_INTERPRET=1) is slow, and
# needs the patches of tests/conftest.py.
interpreted = False

# The last arguments of a convolution: the precision, and the arguments of `Geometry.of` in its order.
_NUMBERS = "str precision, SymInt stride, SymInt padding, SymInt pool, bool relu"


def available(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether kernels accept this tensor: it has this type, and its CUDA device can run kernels.

    PEFLL_KERNELS=0 in the environment switches the kernels off.
    """
    if x.dtype != dtype:
        return False
    return _runs_kernels(x.device) if x.is_cuda else interpreted


@cache
def _runs_kernels(device: torch.device) -> bool:
    """Return whether a small test kernel runs. Triton or a compiler may be missing, or GPU or driver may be too old."""
    wanted = os.environ.get("PEFLL_KERNELS", "1") != "0"
    if not wanted or find_spec("triton") is None or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from pefll.backend.kernels import pointwise

        def attempt() -> None:
            with torch.cuda.device(device):  # a new thread uses the first device
                one = torch.ones(1, dtype=torch.int64, device=device)
                pointwise.choose(one, one, 1, 1, 1, (1, 1))
                torch.cuda.synchronize(device)

        # The attempt runs in a new thread, because a vmap around the caller would change the tensors made here.
        with ThreadPoolExecutor(1) as aside:
            aside.submit(attempt).result()
    except Exception as error:  # noqa: BLE001 - torch's own operations work after any error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warn(f"Triton does not run here ({reason}); without its kernels rounds take longer")
        return False
    return True


def convolves(x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, pool: int) -> bool:
    """Return whether `convolve` supports this: square strides, no groups or dilation, pooling by 2 or no pooling."""
    if x.dtype == torch.bfloat16:  # x is the output of another convolution
        return reads_bf16(x.shape, w, stride, padding, dilation, groups, pool)
    return available(x) and _covers(x.shape, w, stride, padding, dilation, groups, pool)


def reads_bf16(
    shape: Sequence[int], w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, pool: int
) -> bool:
    """Return whether `convolve` can read a bfloat16 input of this shape, [b, ci, h, w], without a copy.

    With bfloat16 products the kernels read a rounded copy of a float32 input. If the previous convolution writes
    bfloat16, that copy is not needed, and memory traffic halves. The input must be float32 in two cases: if the copy
    needs one more channel, and for first layers, whose kernels round by themselves.
    """
    covered = products() == "bf16" and available(w) and _covers(shape, w, stride, padding, dilation, groups, pool)
    if not covered or shape[1] % 4 != 0:
        return False
    from pefll.backend.kernels import convolution, pictures

    s = Geometry.of(shape, w, stride, padding, pool)
    return convolution.factor_type(w, "bf16") == torch.bfloat16 and not pictures.takes(s, "bf16", w.device)


def writes_bf16(x: Tensor, s: Geometry) -> bool:
    """Return whether `convolve` of x may write bfloat16. The gradient of the output is then bfloat16 too.

    If the gradient of x is wanted, first layers need a float32 gradient: the gradient of x is computed in TF32.
    """
    from pefll.backend.kernels import pictures

    return not (has_gradient(x) and pictures.takes(s, "bf16", x.device))


def _covers(
    shape: Sequence[int], w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, pool: int
) -> bool:
    if len(shape) != 4 or shape[0] == 0 or not is_plain(stride, padding, dilation, groups):
        return False
    # All positions of a pooling cell, and all pixels from one cell to the next, must fit into a tile.
    if pool not in (1, 2) or both(stride)[0] * pool not in (1, 2, 4) or w.shape[2] * w.shape[3] > 64:
        return False
    s = Geometry.of(shape, w, stride, padding, pool)
    channels = s.ci + 1  # the NHWC copy may have one more channel
    spread = s.pool**2 * s.co * s.wh * s.ww * channels
    elements = shape[0] * max(s.h * s.w * channels, s.ph * s.pw * s.pool**2 * s.co)
    return spread <= MOST_SPREAD and elements < MOST_ELEMENTS


def multiplies(x: Tensor, w: Tensor) -> bool:
    """Return whether `linear` supports this layer."""
    fits = x.dim() == 2 and x.shape[1:] == w.shape[1:]
    return available(x) and fits and len(x) <= MOST_SAMPLES and len(w) <= MOST_OUTPUTS


# The operations. Their first axis is the client axis.


@custom_op(
    "pefll::convolve",
    mutates_args=(),
    schema=f"(Tensor x, Tensor w, Tensor? bias, bool channels_first, bool bf16_out, {_NUMBERS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _convolve(
    x: Tensor, w: Tensor, bias: Tensor | None, channels_first: bool, bf16_out: bool, precision: str, *sizes: Any
) -> Any:
    """Return outputs y [c, b, co, ph, pw] for x [c, b, ci, h, w], and three tensors for the backward pass."""
    from pefll.backend.kernels import convolution, pictures

    s = Geometry.of(x.shape, w, *sizes)
    arguments = (x, packed(w), maybe_packed(bias), s, precision, channels_first, bf16_out)
    if pictures.takes(s, precision, x.device):
        return *pictures.forward(*arguments), x.new_empty((len(x), 0)), x.new_empty((len(x), 0))
    return tuple(convolution.forward(*arguments))


@custom_op(
    "pefll::convolve_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor x, Tensor w, Tensor route, Tensor nhwc, Tensor spread, bool wants_input, "
    f"{_NUMBERS}) -> (Tensor, Tensor, Tensor)",
)
def _convolve_backward(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    route: Tensor,
    nhwc: Tensor,
    spread: Tensor,
    wants_input: bool,
    precision: str,
    *sizes: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (empty if not wanted), weights and bias.

    If the forward pass made an NHWC copy of its input, both `x` and `nhwc` are that copy. If the previous convolution
    wrote bfloat16, the input was NHWC already. Then `nhwc` is empty, and the gradient of x is bfloat16.
    """
    from pefll.backend.kernels import conv_backward_bf16, conv_input_grad, convolution, pictures

    none = g.new_empty((len(g), 0))
    # If clients share a tensor, the vmap rule expands it without a copy. Kernels need a real row for each client.
    route = route.contiguous()
    if spread.numel():
        dtype = torch.float32 if nhwc.numel() else x.dtype
        nhwc = (nhwc if nhwc.numel() else x.permute(0, 1, 3, 4, 2)).contiguous()
        s = Geometry.of(nhwc.shape[2:4], w, *sizes)
        routed, shares = conv_backward_bf16.routed_gradient(g, route, nhwc, s)
        dw, db = conv_backward_bf16.weight_gradient(routed, shares, nhwc, s)
        dx = conv_backward_bf16.input_gradient(routed, spread.contiguous(), nhwc, s, dtype) if wants_input else none
        return dx.permute(0, 1, 4, 2, 3) if wants_input else dx, dw, db
    s = Geometry.of(x.shape, w, *sizes)
    of_pictures = pictures.takes(s, precision, x.device)
    if of_pictures:
        dw, db = pictures.weight_gradient(g, route, x, s, precision)
        precision = "tf32"  # for the input's gradient, which is rarely needed in a first layer
    if wants_input or not of_pictures:
        g = g.permute(0, 1, 3, 4, 2).contiguous()
    if not of_pictures:
        dw, db = convolution.weight_gradient(g, route, x, s, precision)
    dx = conv_input_grad.input_gradient(g, route, packed(w), s, precision) if wants_input else none
    return dx.permute(0, 1, 4, 2, 3) if wants_input else dx, dw, db


@custom_op("pefll::linear", mutates_args=())
def _linear(x: Tensor, w: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return the layer's output [c, b, o] for inputs x [c, b, i]."""
    from pefll.backend.kernels import linear

    return linear.forward(_rows(x), packed(w), maybe_packed(bias), relu, products())


@custom_op("pefll::linear_backward", mutates_args=())
def _linear_backward(
    g: Tensor, y: Tensor, x: Tensor, w: Tensor, relu: bool, wants_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (empty if not wanted), weights and bias."""
    from pefll.backend.kernels import linear

    dx, dw, db = linear.backward(_rows(g), y.contiguous(), _rows(x), packed(w), relu, wants_input, products())
    return dx if wants_input else x.new_empty((len(x), 0)), dw, db


def _rows(x: Tensor) -> Tensor:
    """Return x [c, a, b] with contiguous rows x[i, j]. The other axes may have any strides."""
    return x if x.stride(2) == 1 else x.contiguous()


@custom_op("pefll::cross_entropy", mutates_args=())
def _cross_entropy(scores: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean cross-entropy [c] of scores [c, b, classes], and its gradient."""
    from pefll.backend.kernels import pointwise

    return pointwise.cross_entropy(packed(scores), packed(y), packed(weight))


@custom_op("pefll::pixels", mutates_args=())
def _pixels(rows: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return samples `rows` [c, b] of x [N, ci, h, w] as [c, b, ci, h, w], scaled and shifted per channel."""
    from pefll.backend.kernels import pointwise

    return pointwise.pixels(x, _rows(rows[None])[0], scale, shift).permute(0, 1, 4, 2, 3)


for _operation in (_convolve, _convolve_backward, _linear, _linear_backward, _cross_entropy):
    merge_mapped_axis(_operation)
merge_mapped_axis(_pixels, shared=frozenset({1, 2, 3}))


# Autograd functions, each for one client.


class _ConvolveBackward(NoSecondDerivative):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        parts = (part.unsqueeze(0) for part in arguments[:6])
        return tuple(part.squeeze(0) for part in _convolve_backward(*parts, *arguments[6:]))


class _Convolve(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, *numbers: Any) -> tuple[Tensor, ...]:
        parts = (with_client_axis(part) for part in (x, w, bias))
        return tuple(part.squeeze(0) for part in _convolve(*parts, *numbers))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # else autograd would launch kernels to make zeros for the other outputs
        x, w, nhwc = *inputs[:2], output[2]
        ctx.save_for_backward(nhwc if nhwc.numel() else x, w, *output[1:])
        ctx.numbers = inputs[5:]

    @staticmethod
    def backward(ctx: Any, g: Tensor, *others: Tensor) -> Any:
        wants_input, _, wants_bias = ctx.needs_input_grad[:3]
        dx, dw, db = apply(_ConvolveBackward, g, *ctx.saved_tensors, wants_input, *ctx.numbers)
        return dx if wants_input else None, dw, db if wants_bias else None, None, None, *(None for _ in ctx.numbers)


class _LinearBackward(NoSecondDerivative):
    @staticmethod
    def forward(g: Tensor, y: Tensor, x: Tensor, w: Tensor, relu: bool, wants_input: bool) -> Any:
        parts = (part.unsqueeze(0) for part in (g, y, x, w))
        return tuple(part.squeeze(0) for part in _linear_backward(*parts, relu, wants_input))


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        y: Tensor = _linear(x.unsqueeze(0), w.unsqueeze(0), with_client_axis(bias), relu)
        return y.squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, relu = inputs
        ctx.save_for_backward(output, x, w)
        ctx.relu = relu

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        wants_input, _, wants_bias, _ = ctx.needs_input_grad
        dx, dw, db = apply(_LinearBackward, g, *ctx.saved_tensors, ctx.relu, wants_input)
        return dx if wants_input else None, dw, db if wants_bias else None, None


class _CrossEntropyBackward(NoSecondDerivative):
    @staticmethod
    def forward(g: Tensor, gradient: Tensor, scores: Tensor) -> Tensor:
        del scores  # it is an argument only so that a second derivative raises an error
        return g * gradient


class _CrossEntropyGradient(NoSecondDerivative):
    @staticmethod
    def forward(scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        gradient: Tensor = _cross_entropy(scores.unsqueeze(0), y.unsqueeze(0), weight.unsqueeze(0))[1]
        return gradient.squeeze(0)


class _CrossEntropy(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient = _cross_entropy(scores.unsqueeze(0), y.unsqueeze(0), weight.unsqueeze(0))
        return loss.squeeze(0), gradient.squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *others: Tensor) -> Any:
        return apply(_CrossEntropyBackward, g, *ctx.saved_tensors), None, None


def convolve(
    x: Tensor, w: Tensor, bias: Tensor | None, s: Geometry, channels_first: bool = False, bf16_out: bool = False
) -> Tensor:
    """Return the convolution of x with w, then pooling and ReLU as `s` says, [b, co, ph, pw].

    Args:
        x: [b, ci, h, w].
        w: [co, ci, kh, kw].
        bias: [co], or None.
        s: the sizes.
        channels_first: whether channels are outermost in the output's memory; by default they are innermost.
        bf16_out: whether the output and its gradient are bfloat16. `writes_bf16` must be true for this convolution, and
            `reads_bf16` for the next one. This changes no factor of any product. The bias's gradient, a float32 sum,
            then adds rounded gradients, as it always does in CUDA C++.
    """
    numbers = (channels_first, bf16_out, products(), s.stride, s.padding, s.pool, s.relu)
    y: Tensor = apply(_Convolve, x, w, bias, *numbers)[0]
    return y


def linear(x: Tensor, w: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return a linear layer's output [b, o] for x [b, i], weights w [o, i] and bias [o], with ReLU if `relu`."""
    y: Tensor = apply(_Linear, x, w, bias, relu)
    return y


def cross_entropy(scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the mean cross-entropy [] of scores [b, classes] for labels y [b], weighted by `weight` [b]."""
    loss: Tensor = apply(_CrossEntropy, scores, y, weight)[0]
    return loss


def cross_entropy_gradient(scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient [b, classes] of `cross_entropy` with respect to the scores."""
    gradient: Tensor = apply(_CrossEntropyGradient, scores, y, weight)
    return gradient


def pixels(rows: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return samples `rows` [b] of x (uint8 [N, ci, h, w]) as float32 [b, ci, h, w], scaled and shifted per channel."""
    taken: Tensor = _pixels(rows.unsqueeze(0), x, scale, shift).squeeze(0)
    return taken
