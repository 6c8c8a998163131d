"""A linear layer with few rows and very many outputs: a hypernetwork's last one. The server's, so no client axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from pefll.backend import client_axis
from pefll.backend.mapped import NoSecondDerivative, apply, mapped_over
from pefll.backend.precision import products

# Tiles of the kernels hold all rows and all inputs; elements are counted with 32 bits.
MOST_ROWS, MOST_INPUTS, MOST_ELEMENTS = 64, 256, 1 << 31


def takes(x: Tensor, w: Tensor) -> bool:
    """Return whether `linear` takes such a layer: more outputs than `client_axis.linear` takes, not mapped."""
    if not client_axis.available(x) or x.dim() != 2 or x.shape[1:] != w.shape[1:] or mapped_over(x) or mapped_over(w):
        return False
    most = max(w.numel(), len(x) * len(w))
    fits = 0 < len(x) <= MOST_ROWS and 0 < x.shape[1] <= MOST_INPUTS and most < MOST_ELEMENTS
    return fits and len(w) > client_axis.MOST_OUTPUTS


@custom_op("pefll::hypernet_linear", mutates_args=())
def _linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Map x [r, i] to [r, o]."""
    from pefll.backend.kernels import hypernet_linear

    return hypernet_linear.forward(
        x.contiguous(), w.contiguous(), None if bias is None else bias.contiguous(), _products()
    )


@custom_op("pefll::hypernet_linear_backward", mutates_args=())
def _linear_backward(
    g: Tensor, x: Tensor, w: Tensor, wants_input: bool, wants_weights: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the weights and of the bias, empty where they are not wanted."""
    from pefll.backend.kernels import hypernet_linear

    g = g.contiguous()
    dx = hypernet_linear.input_gradient(g, w.contiguous(), _products()) if wants_input else g.new_empty(0)
    dw, db = hypernet_linear.weight_gradient(g, x.contiguous()) if wants_weights else (g.new_empty(0), g.new_empty(0))
    return dx, dw, db


def _products() -> str:
    """Return how to multiply: memory is what takes the time, so that nothing would be won with bfloat16."""
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
    """Return x [r, i] times w [o, i], plus bias [o]."""
    y: Tensor = apply(_Linear, x, w, bias)
    return y
