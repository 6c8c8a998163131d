"""Operations with a client axis: written for one client, and under `torch.func.vmap` one kernel for all of them.

Each is a `torch.library` operation that takes the client axis first, with a vmap rule that merges mapped axes into it,
and an autograd function for one client around it. They are differentiable once. The kernels are Triton's, and
CUDA C++ for first layers; what they do not cover (other devices and types, grouped or dilated convolutions) is for
`pefll.backend.blocks` to do plainly.
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

from pefll.backend.geometry import Geometry, Pair
from pefll.backend.mapped import NoSecondDerivative as _Once
from pefll.backend.mapped import apply as _apply
from pefll.backend.mapped import has_gradient, merge_mapped_axis
from pefll.backend.mapped import packed as _packed
from pefll.backend.precision import products

# A linear layer's backward kernel holds a batch and loops over the outputs: it is for batches and layers of a client's
# size. A hypernetwork's last layer is for `pefll.backend.hypernet_linear`, and what else is larger for cuBLAS.
MOST_SAMPLES, MOST_OUTPUTS = 128, 1024

# Kernels count the elements of one client's arrays with 32 bits, and spread weights should not fill the card.
MOST_ELEMENTS, MOST_SPREAD = 1 << 31, 1 << 22

# Whether kernels also take tensors on a CPU, slowly, one program after another; for tests, with TRITON_INTERPRET=1 and
# what tests/conftest.py mends in the interpreter.
interpreted = False


def available(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether kernels take this tensor: of one type, on a CUDA device that can run them.

    PEFLL_KERNELS=0 in the environment switches them off, and torch's own operations do everything.
    """
    if x.dtype != dtype:
        return False
    return _runs_kernels(x.device) if x.is_cuda else interpreted


@cache
def _runs_kernels(device: torch.device) -> bool:
    """Try it once: Triton may be absent, the card or its software too old or another maker's, a compiler missing."""
    wanted = os.environ.get("PEFLL_KERNELS", "1") != "0"
    if not wanted or find_spec("triton") is None or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from pefll.backend.kernels import pointwise

        def attempt() -> None:
            with torch.cuda.device(device):  # a new thread is on the first one
                one = torch.ones(1, dtype=torch.int64, device=device)
                pointwise.choose(one, one, 1, 1, 1, (1, 1))
                torch.cuda.synchronize(device)

        # In a thread of its own, where the tensors are ordinary ones even if whoever asks is being mapped.
        with ThreadPoolExecutor(1) as aside:
            aside.submit(attempt).result()
    except Exception as error:  # noqa: BLE001 - whatever it is, torch's own operations still work
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"Triton does not run here ({reason}); without its kernels rounds take longer", stacklevel=2)
        return False
    return True


def convolves(x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, pool: int) -> bool:
    """Return whether `convolve` takes such a convolution: square steps, no groups, no gaps, pooled by 2 or not."""
    if x.dtype == torch.bfloat16:  # written by the convolution before
        return reads_bf16(x.shape, w, stride, padding, dilation, groups, pool)
    return available(x) and _covers(x.shape, w, stride, padding, dilation, groups, pool)


def reads_bf16(
    shape: Sequence[int], w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, pool: int
) -> bool:
    """Return whether `convolve` takes such a convolution of bfloat16 numbers [b, ci, h, w], as they lie.

    Where products are bfloat16, a rounded copy of float32 numbers is all that its kernels look at. Whoever writes them
    rounded saves that copy, and half of what is written and read. Not so where the copy has a channel more, and for
    first layers, whose kernels round by themselves.

    Args:
        shape: of the input.
        w: float32 [co, ci, kh, kw].
        stride: of the convolution.
        padding: of the convolution.
        dilation: of the convolution.
        groups: of the convolution.
        pool: side of the pooled squares.
    """
    covered = products() == "bf16" and available(w) and _covers(shape, w, stride, padding, dilation, groups, pool)
    if not covered or shape[1] % 4 != 0:
        return False
    from pefll.backend.kernels import convolution, pictures

    s = _geometry(shape[2], shape[3], w, _both(stride)[0], _both(padding)[0], pool, relu=True)
    return convolution.factor_type(w, "bf16") == torch.bfloat16 and not pictures.takes(s, "bf16", w.device)


def writes_bf16(x: Tensor, w: Tensor, stride: int, padding: int, pool: int) -> bool:
    """Return whether `convolve` of x may write bfloat16, whose gradient is then bfloat16 too.

    Not where somebody wants the gradient of x and x is read by CUDA C++: that is made, in TF32, from a float32 one.
    """
    from pefll.backend.kernels import pictures

    s = _geometry(x.shape[2], x.shape[3], w, stride, padding, pool, relu=True)
    return not (has_gradient(x) and pictures.takes(s, "bf16", x.device))


def output_shape(x: Tensor, w: Tensor, stride: int, padding: int, pool: int) -> tuple[int, int, int, int]:
    """Return the shape [b, co, ph, pw] of what `convolve` makes of x."""
    s = _geometry(x.shape[2], x.shape[3], w, stride, padding, pool, relu=True)
    return len(x), s.co, s.ph, s.pw


def _covers(
    shape: Sequence[int], w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, pool: int
) -> bool:
    if len(shape) != 4:
        return False
    square = len(set(_both(stride))) == 1 and len(set(_both(padding))) == 1
    plain = _both(dilation) == (1, 1) and groups == 1
    # Tiles hold all positions of a pooling cell, and all pixels that one step of the cells moves over.
    fits = pool in (1, 2) and _both(stride)[0] * pool in (1, 2, 4) and w.shape[2] * w.shape[3] <= 64
    if not (square and plain and fits and shape[0] > 0):
        return False
    s = _geometry(shape[2], shape[3], w, _both(stride)[0], _both(padding)[0], pool, relu=True)
    channels = s.ci + 1  # where pictures are laid out, there may be one more
    spread = s.pool**2 * s.co * s.wh * s.ww * channels
    elements = shape[0] * max(s.h * s.w * channels, s.ph * s.pw * s.pool**2 * s.co)
    return spread <= MOST_SPREAD and elements < MOST_ELEMENTS


def multiplies(x: Tensor, w: Tensor) -> bool:
    """Return whether `linear` takes such a layer."""
    fits = x.dim() == 2 and x.shape[1:] == w.shape[1:]
    return available(x) and fits and len(x) <= MOST_SAMPLES and len(w) <= MOST_OUTPUTS


def _both(pair: Pair) -> tuple[int, int]:
    return (pair, pair) if isinstance(pair, int) else (pair[0], pair[-1])


# The operations, all with a client axis.


@custom_op("pefll::convolve", mutates_args=())
def _convolve(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: int,
    pool: int,
    relu: bool,
    precision: str,
    channels_first: bool,
    bf16_out: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map x [c, b, ci, h, w] to y [c, b, co, ph, pw], and to what the backward pass looks at besides."""
    from pefll.backend.kernels import convolution, pictures

    s = _geometry(x.shape[3], x.shape[4], w, stride, padding, pool, relu)
    if pictures.takes(s, precision, x.device):
        y, route = pictures.forward(x, _packed(w), _maybe_packed(bias), s, precision, channels_first, bf16_out)
        return y, route, x.new_empty((len(x), 0)), x.new_empty((len(x), 0))
    numbers = (s, precision, channels_first, bf16_out)
    y, route, nhwc, spread = convolution.forward(x, _packed(w), _maybe_packed(bias), *numbers)
    return y, route, nhwc, spread


@custom_op("pefll::convolve_backward", mutates_args=())
def _convolve_backward(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    route: Tensor,
    nhwc: Tensor,
    spread: Tensor,
    stride: int,
    padding: int,
    pool: int,
    relu: bool,
    precision: str,
    wants_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (empty where it is not wanted), of the weights and of the bias.

    Where x was laid out for its products it need not be kept, and `nhwc` is given in its place. Where x lay so already,
    because the convolution before wrote bfloat16, it is given itself, and its gradient is bfloat16 too.
    """
    from pefll.backend.kernels import conv_backward_bf16, conv_input_grad, convolution, pictures

    none = g.new_empty((len(g), 0))
    # What every client shares is expanded by the vmap rule; kernels step through it client by client.
    route = route.contiguous()
    if spread.numel():
        dtype = torch.float32 if nhwc.numel() else x.dtype
        nhwc = (nhwc if nhwc.numel() else x.permute(0, 1, 3, 4, 2)).contiguous()
        s = _geometry(nhwc.shape[2], nhwc.shape[3], w, stride, padding, pool, relu)
        routed, shares = conv_backward_bf16.routed_gradient(g, route, nhwc, s)
        dw, db = conv_backward_bf16.weight_gradient(routed, shares, nhwc, s)
        dx = conv_backward_bf16.input_gradient(routed, spread.contiguous(), nhwc, s, dtype) if wants_input else none
        return dx.permute(0, 1, 4, 2, 3) if wants_input else dx, dw, db
    s = _geometry(x.shape[3], x.shape[4], w, stride, padding, pool, relu)
    of_pictures = pictures.takes(s, precision, x.device)
    if of_pictures:
        dw, db = pictures.weight_gradient(g, route, x, s, precision)
        precision = "tf32"  # of the input's gradient, which hardly anybody asks for in a first layer
    if wants_input or not of_pictures:
        g = g.permute(0, 1, 3, 4, 2).contiguous()
    if not of_pictures:
        dw, db = convolution.weight_gradient(g, route, x, s, precision)
    dx = conv_input_grad.input_gradient(g, route, _packed(w), s, precision) if wants_input else none
    return dx.permute(0, 1, 4, 2, 3) if wants_input else dx, dw, db


def _geometry(height: int, width: int, w: Tensor, stride: int, padding: int, pool: int, relu: bool) -> Geometry:
    co, ci, kh, kw = w.shape[-4:]
    return Geometry(ci, height, width, co, kh, kw, stride, padding, pool, relu)


@custom_op("pefll::linear", mutates_args=())
def _linear(x: Tensor, w: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Map x [c, b, i] to [c, b, o]."""
    from pefll.backend.kernels import linear

    return linear.forward(_rows(x), _packed(w), _maybe_packed(bias), relu, products())


@custom_op("pefll::linear_backward", mutates_args=())
def _linear_backward(
    g: Tensor, y: Tensor, x: Tensor, w: Tensor, relu: bool, wants_input: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (empty where it is not wanted), of the weights and of the bias."""
    from pefll.backend.kernels import linear

    dx, dw, db = linear.backward(_rows(g), y.contiguous(), _rows(x), _packed(w), relu, wants_input, products())
    return dx if wants_input else x.new_empty((len(x), 0)), dw, db


def _rows(x: Tensor) -> Tensor:
    """Return x [c, a, b] with each row contiguous, and rows in equal distances."""
    return x if x.stride(2) == 1 else x.contiguous()


def _maybe_packed(x: Tensor | None) -> Tensor | None:
    return None if x is None else _packed(x)


@custom_op("pefll::cross_entropy", mutates_args=())
def _cross_entropy(scores: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean cross-entropy [c] of scores [c, b, classes], and its gradient."""
    from pefll.backend.kernels import pointwise

    return pointwise.cross_entropy(_packed(scores), _packed(y), _packed(weight))


@custom_op("pefll::pixels", mutates_args=())
def _pixels(rows: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return samples `rows` [c, b] of x [N, ci, h, w], scaled and shifted per channel, [c, b, ci, h, w]."""
    from pefll.backend.kernels import pointwise

    return pointwise.pixels(x, _rows(rows[None])[0], scale, shift).permute(0, 1, 4, 2, 3)


for _operation in (_convolve, _convolve_backward, _linear, _linear_backward, _cross_entropy):
    merge_mapped_axis(_operation)
merge_mapped_axis(_pixels, shared=frozenset({1, 2, 3}))


# For one client, with gradients.


class _ConvolveBackward(_Once):
    @staticmethod
    def forward(
        g: Tensor, x: Tensor, w: Tensor, route: Tensor, nhwc: Tensor, spread: Tensor, *numbers: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = (part.unsqueeze(0) for part in (g, x, w, route, nhwc, spread))
        dx, dw, db = _convolve_backward(*parts, *numbers)
        return dx.squeeze(0), dw.squeeze(0), db.squeeze(0)


class _Convolve(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, *numbers: Any) -> tuple[Tensor, ...]:
        one = None if bias is None else bias.unsqueeze(0)
        return tuple(part.squeeze(0) for part in _convolve(x.unsqueeze(0), w.unsqueeze(0), one, *numbers))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # zeros for the others would be more kernels
        x, w = inputs[:2]
        nhwc = output[2]
        ctx.save_for_backward(nhwc if nhwc.numel() else x, w, *output[1:])
        ctx.numbers = inputs[3:-2]  # not how the output is written

    @staticmethod
    def backward(ctx: Any, g: Tensor, *others: Tensor) -> Any:
        wants_input, _, wants_bias = ctx.needs_input_grad[:3]
        dx, dw, db = _apply(_ConvolveBackward, g, *ctx.saved_tensors, *ctx.numbers, wants_input)
        return dx if wants_input else None, dw, db if wants_bias else None, *(None for _ in ctx.numbers), None, None


class _LinearBackward(_Once):
    @staticmethod
    def forward(g: Tensor, y: Tensor, x: Tensor, w: Tensor, relu: bool, wants_input: bool) -> Any:
        parts = (part.unsqueeze(0) for part in (g, y, x, w))
        return tuple(part.squeeze(0) for part in _linear_backward(*parts, relu, wants_input))


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        one = None if bias is None else bias.unsqueeze(0)
        y: Tensor = _linear(x.unsqueeze(0), w.unsqueeze(0), one, relu)
        return y.squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, relu = inputs
        ctx.save_for_backward(output, x, w)
        ctx.relu = relu

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        wants_input, _, wants_bias, _ = ctx.needs_input_grad
        dx, dw, db = _apply(_LinearBackward, g, *ctx.saved_tensors, ctx.relu, wants_input)
        return dx if wants_input else None, dw, db if wants_bias else None, None


class _CrossEntropyBackward(_Once):
    @staticmethod
    def forward(g: Tensor, gradient: Tensor, scores: Tensor) -> Tensor:
        del scores  # here so that whoever differentiates again is told
        return g * gradient


class _CrossEntropyGradient(_Once):
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
        return _apply(_CrossEntropyBackward, g, *ctx.saved_tensors), None, None


def convolve(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: int,
    padding: int,
    pool: int,
    relu: bool,
    channels_first: bool = False,
    bf16_out: bool = False,
) -> Tensor:
    """Return the convolution of x [b, ci, h, w] with w [co, ci, kh, kw], then pooled, then through ReLU.

    In memory its channels are innermost, or `channels_first`, so that a picture's numbers are one row. With `bf16_out`,
    where this one `writes_bf16` and the next one `reads_bf16`, they are bfloat16, and so is their gradient. All
    products have the factors that they have without. The bias's gradient is a float32 sum of gradients as they come:
    with `bf16_out` of rounded ones, as in CUDA C++ it always is.
    """
    numbers = (stride, padding, pool, relu, products(), channels_first, bf16_out)
    y: Tensor = _apply(_Convolve, x, w, bias, *numbers)[0]
    return y


def linear(x: Tensor, w: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return x [b, i] times w [o, i], plus bias [o], through ReLU."""
    y: Tensor = _apply(_Linear, x, w, bias, relu)
    return y


def cross_entropy(scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the mean cross-entropy [] of scores [b, classes] with labels y [b], weighted by `weight` [b]."""
    loss: Tensor = _apply(_CrossEntropy, scores, y, weight)[0]
    return loss


def cross_entropy_gradient(scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient [b, classes] of `cross_entropy` with respect to the scores."""
    gradient: Tensor = _apply(_CrossEntropyGradient, scores, y, weight)
    return gradient


def pixels(rows: Tensor, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return samples `rows` [b] of x (uint8 [N, ci, h, w]) as float32 [b, ci, h, w], scaled and shifted per channel."""
    taken: Tensor = _pixels(rows.unsqueeze(0), x, scale, shift).squeeze(0)
    return taken
