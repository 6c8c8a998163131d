"""The last linear layer of a hypernetwork: few rows, very many outputs. It runs on the server; no client axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from pefll.backend import client_axis
from pefll.backend.mapped import NoSecondDerivative, apply, mapped_over
from pefll.backend.precision import products

# Limits: all rows and all inputs must fit into one tile, and kernels count elements with 32 bits.
MOST_ROWS, MOST_INPUTS, MOST_ELEMENTS = 64, 256, 1 << 31


def takes(x: Tensor, w: Tensor) -> bool:
    """Return whether `linear` supports this layer. It must have too many outputs for `client_axis.linear`."""
    if not client_axis.available(x) or x.dim() != 2 or x.shape[1:] != w.shape[1:] or mapped_over(x) or mapped_over(w):
        return False
    most = max(w.numel(), len(x) * len(w))
    fits = 0 < len(x) <= MOST_ROWS and 0 < x.shape[1] <= MOST_INPUTS and most < MOST_ELEMENTS
    return fits and len(w) > client_axis.MOST_OUTPUTS


@custom_op("pefll::hypernet_linear", mutates_args=())
def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Return the layer's output [r, o] for inputs x [r, i]."""
    from pefll.backend.kernels import hypernet_linear

    start = None if bias is None else bias.contiguous()
    return hypernet_linear.forward(x.contiguous(), w.contiguous(), start, _products())


@custom_op("pefll::hypernet_linear_backward", mutates_args=())
def _linear_backward(
    g: Tensor, x: Tensor, w: Tensor, wants_input: bool, wants_weights: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weights and bias. A gradient that is not wanted is an empty tensor."""
    from pefll.backend.kernels import hypernet_linear

    g = g.contiguous()
    dx = hypernet_linear.input_gradient(g, w.contiguous(), _products()) if wants_input else g.new_empty(0)
    dw, db = hypernet_linear.weight_gradient(g, x.contiguous()) if wants_weights else (g.new_empty(0), g.new_empty(0))
    return dx, dw, db


def _products() -> str:
    """Return how to multiply. bfloat16 becomes TF32: memory limits the speed, so bfloat16 would gain nothing."""
    return "tf32" if products() == "bf16" else products()


class _LinearBackward(NoSecondDerivative):
    @staticmethod
    def forward(g: Tensor, x: Tensor, w: Tensor, wants_input: bool, wants_weights: bool) -> Any:
        return _linear_backward(g, x, w, wants_input, wants_weights)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _linear(x, w, bias)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        wants_input, *wants_others = ctx.needs_input_grad
        dx, dw, db = apply(_LinearBackward, g, *ctx.saved_tensors, wants_input, any(wants_others))
        wanted = zip((dx, dw, db), ctx.needs_input_grad, strict=True)
        return tuple(gradient if wants else None for gradient, wants in wanted)


def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Return the linear layer's output [r, o] for x [r, i], weights w [o, i] and bias [o]."""
    y: Tensor = apply(_Linear, x, w, bias)
    return y
