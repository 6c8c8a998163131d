"""Operations with a client axis: one kernel for all clients under `torch.func.vmap`.

A caller writes for one client. Each operation is a `torch.library` operation with the client axis first. Its vmap rule
merges mapped axes into that axis, and an autograd function for one client wraps it. It can be differentiated once.
The kernels are Triton's, and CUDA C++ for first layers. `pefll.backend.blocks` uses torch for the rest: other devices
and types, grouped and dilated convolutions.
"""

from __future__ import annotations

import os
import warnings
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

# The backward kernel of a linear layer holds a whole batch and loops over outputs, so both must be small. The last
# layer of a hypernetwork goes to `pefll.backend.hypernet_linear`, other large layers to cuBLAS.
MOST_SAMPLES, MOST_OUTPUTS = 128, 1024

# Kernels count the elements of one client's arrays with 32 bits. The second limit bounds the memory of spread weights.
MOST_ELEMENTS, MOST_SPREAD = 1 << 31, 1 << 22

# Whether kernels also take tensors on a CPU. For tests only: Triton's interpreter (TRITON_INTERPRET=1) is slow, and
# needs the patches of tests/conftest.py.
interpreted = False

# The last arguments of a convolution: how to multiply, and its sizes in the order of `Geometry.of`.
_NUMBERS = "str precision, SymInt stride, SymInt padding, SymInt pool, bool relu"


def available(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether kernels take this tensor: it has this type, and its CUDA device can run them.

    PEFLL_KERNELS=0 in the environment switches the kernels off.
    """
    if x.dtype != dtype:
        return False
    return _runs_kernels(x.device) if x.is_cuda else interpreted


@cache
def _runs_kernels(device: torch.device) -> bool:
    """Return whether one small kernel runs: Triton or a compiler may be missing, the card or its driver too old."""
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

        # In its own thread, because a vmap around the caller would change the tensors made here.
        with ThreadPoolExecutor(1) as aside:
            aside.submit(attempt).result()
    except Exception as error:  # noqa: BLE001 - torch's own operations work after any error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"Triton does not run here ({reason}); without its kernels rounds take longer", stacklevel=2)
        return False
    return True


def convolves(x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, pool: int) -> bool:
    """Return whether `convolve` takes this convolution: square strides, no groups or dilation, pooling by 2 or none."""
    if x.dtype == torch.bfloat16:  # the previous convolution wrote it
        return reads_bf16(x.shape, w, stride, padding, dilation, groups, pool)
    return available(x) and _covers(x.shape, w, stride, padding, dilation, groups, pool)


def reads_bf16(
    shape: Sequence[int], w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, pool: int
) -> bool:
    """Return whether `convolve` takes a bfloat16 input of this shape, [b, ci, h, w], without a copy.

    With bfloat16 products the kernels read a rounded copy of a float32 input. If the previous convolution writes
    bfloat16, that copy is not needed, and memory traffic halves. Two cases need float32: a copy with one more channel,
    and first layers, whose kernels round by themselves.
    """
    covered = products() == "bf16" and available(w) and _covers(shape, w, stride, padding, dilation, groups, pool)
    if not covered or shape[1] % 4 != 0:
        return False
    from pefll.backend.kernels import convolution, pictures

    s = Geometry.of(shape, w, stride, padding, pool)
    return convolution.factor_type(w, "bf16") == torch.bfloat16 and not pictures.takes(s, "bf16", w.device)


def writes_bf16(x: Tensor, s: Geometry) -> bool:
    """Return whether `convolve` of x may write bfloat16; the gradient of its output is then bfloat16 too.

    The CUDA C++ kernels need a float32 gradient if the gradient of x is wanted: they compute it in TF32.
    """
    from pefll.backend.kernels import pictures

    return not (has_gradient(x) and pictures.takes(s, "bf16", x.device))


def _covers(
    shape: Sequence[int], w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, pool: int
) -> bool:
    if len(shape) != 4 or shape[0] == 0 or not is_plain(stride, padding, dilation, groups):
        return False
    # A tile holds all positions of a pooling cell, and all pixels between two neighbouring cells.
    if pool not in (1, 2) or both(stride)[0] * pool not in (1, 2, 4) or w.shape[2] * w.shape[3] > 64:
        return False
    s = Geometry.of(shape, w, stride, padding, pool)
    channels = s.ci + 1  # the NHWC copy may have one more
    spread = s.pool**2 * s.co * s.wh * s.ww * channels
    elements = shape[0] * max(s.h * s.w * channels, s.ph * s.pw * s.pool**2 * s.co)
    return spread <= MOST_SPREAD and elements < MOST_ELEMENTS


def multiplies(x: Tensor, w: Tensor) -> bool:
    """Return whether `linear` takes this layer."""
    fits = x.dim() == 2 and x.shape[1:] == w.shape[1:]
    return available(x) and fits and len(x) <= MOST_SAMPLES and len(w) <= MOST_OUTPUTS


# The operations have the client axis first.


@custom_op(
    "pefll::convolve",
    mutates_args=(),
    schema=f"(Tensor x, Tensor w, Tensor? bias, bool channels_first, bool bf16_out, {_NUMBERS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _convolve(
    x: Tensor, w: Tensor, bias: Tensor | None, channels_first: bool, bf16_out: bool, precision: str, *sizes: Any
) -> Any:
    """Return y [c, b, co, ph, pw] of x [c, b, ci, h, w], and three tensors for the backward pass."""
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

    If the forward pass made an NHWC copy of x, x is that copy too. If x was NHWC already, because the previous
    convolution wrote bfloat16, `nhwc` is empty, and the gradient of x is bfloat16.
    """
    from pefll.backend.kernels import conv_backward_bf16, conv_input_grad, convolution, pictures

    none = g.new_empty((len(g), 0))
    # The vmap rule expands what clients share; kernels need a row for each client.
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
        precision = "tf32"  # for the input's gradient, which a first layer rarely needs
    if wants_input or not of_pictures:
        g = g.permute(0, 1, 3, 4, 2).contiguous()
    if not of_pictures:
        dw, db = convolution.weight_gradient(g, route, x, s, precision)
    dx = conv_input_grad.input_gradient(g, route, packed(w), s, precision) if wants_input else none
    return dx.permute(0, 1, 4, 2, 3) if wants_input else dx, dw, db


@custom_op("pefll::linear", mutates_args=())
def _linear(x: Tensor, w: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return [c, b, o] of x [c, b, i]."""
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
    """Return x [c, a, b] with contiguous rows x[i, j]; the strides of the other axes may be any."""
    return x if x.stride(2) == 1 else x.contiguous()


@custom_op("pefll::cross_entropy", mutates_args=())
def _cross_entropy(scores: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean cross-entropy [c] of scores [c, b, classes], and its gradient."""
    from pefll.backend.kernels import pointwise

    return pointwise.cross_entropy(packed(scores), packed(y), packed(weight))


@custom_op("pefll::pixels", mutates_args=())
def _pixels(rows: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return samples `rows` [c, b] of x [N, ci, h, w], scaled and shifted per channel, [c, b, ci, h, w]."""
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
        ctx.set_materialize_grads(False)  # zeros for the other outputs would cost kernels
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
        del scores  # an argument, so that a second derivative raises an error
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
    """Return the convolution of x [b, ci, h, w] with w [co, ci, kh, kw], pooled, with ReLU.

    Args:
        x: [b, ci, h, w].
        w: [co, ci, kh, kw].
        bias: [co], or None.
        s: the sizes.
        channels_first: the memory layout of the output; channels are innermost by default.
        bf16_out: whether the output, and so its gradient, is bfloat16. This convolution must `writes_bf16` and the next
            one `reads_bf16`. The factors of all products stay the same. The bias's gradient, a float32 sum, then adds
            rounded gradients, as it always does in CUDA C++.
    """
    numbers = (channels_first, bf16_out, products(), s.stride, s.padding, s.pool, s.relu)
    y: Tensor = apply(_Convolve, x, w, bias, *numbers)[0]
    return y


def linear(x: Tensor, w: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return the linear layer of x [b, i] with w [o, i] and bias [o], with ReLU or without."""
    y: Tensor = apply(_Linear, x, w, bias, relu)
    return y


def cross_entropy(scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the mean cross-entropy [] of scores [b, classes] with labels y [b], weighted by `weight` [b]."""
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
