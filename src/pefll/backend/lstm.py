"""An LSTM layer with a client axis: one product for the inputs of all time steps, and fused kernels over time.

The backward pass is the same in reverse: fused kernels over time give the gradients of all gates, and one product each
gives the gradients of input and weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from pefll.backend import client_axis
from pefll.backend.mapped import NoSecondDerivative, apply, has_gradient, merge_mapped_axis, packed
from pefll.backend.precision import products
from pefll.core.reference import fast
from pefll.models import lstm

MOST_ELEMENTS = 1 << 31  # kernels count the gates of one client with 32 bits
MOST_AT_ONCE = 1 << 29  # gates of several clients, without a backward pass: 2 GB


@custom_op("pefll::lstm", mutates_args=())
def _lstm(
    x: Tensor, of_input: Tensor, of_state: Tensor, bias_1: Tensor, bias_2: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the states [c, T, b, h] of x [c, T, b, i], and three tensors for the backward pass.

    These are gates and memories, and the states in the type of factors (empty if they are float32).
    """
    states = x.new_empty((*x.shape[:3], of_state.shape[2]))
    gates, memories, factors = _run(x, of_input, of_state, bias_1, bias_2, precision, True, states)
    return states, gates, memories, factors if factors is not states else x.new_empty((len(x), 0))


@custom_op("pefll::lstm_states", mutates_args=())
def _lstm_states(
    x: Tensor, of_input: Tensor, of_state: Tensor, bias_1: Tensor, bias_2: Tensor, precision: str
) -> Tensor:
    """Return the states [c, T, b, h] of x [c, T, b, i]; a part of the clients at a time, to save memory."""
    states = x.new_empty((*x.shape[:3], of_state.shape[2]))
    clients = max(1, MOST_AT_ONCE // (4 * states[0].numel()))
    for first in range(0, len(x), clients):
        of = slice(first, first + clients)
        _run(x[of], of_input[of], of_state[of], bias_1[of], bias_2[of], precision, False, states[of])
    return states


def _run(
    x: Tensor,
    of_input: Tensor,
    of_state: Tensor,
    bias_1: Tensor,
    bias_2: Tensor,
    precision: str,
    keeps: bool,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from pefll.backend.kernels import lstm as kernels

    kind = _factor_type(x, precision)
    by_gate = _product(_rows(x).to(kind), of_input.to(kind).mT).view(*x.shape[:3], -1)
    parameters = packed(of_state.to(kind)), packed(bias_1), packed(bias_2)
    return kernels.forward(by_gate, *parameters, _float32_products(precision), keeps, states)


@custom_op("pefll::lstm_backward", mutates_args=())
def _lstm_backward(
    g: Tensor,
    x: Tensor,
    of_input: Tensor,
    of_state: Tensor,
    states: Tensor,
    gates: Tensor,
    memories: Tensor,
    wants_input: bool,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (empty if not wanted), of both weights, and of each bias."""
    from pefll.backend.kernels import lstm as kernels

    kind = _factor_type(x, precision)
    backwards = of_state.mT.to(kind, memory_format=torch.contiguous_format).contiguous()
    dgates, db = kernels.backward(
        g.contiguous(), gates.contiguous(), memories.contiguous(), backwards, _float32_products(precision)
    )
    of_gates = _rows(dgates)
    dx = _product(of_gates, of_input.to(kind)).view(x.shape) if wants_input else x.new_empty((len(x), 0))
    d_input = _product(of_gates.mT, _rows(x).to(kind))
    d_state = _product(_rows(dgates[:, 1:]).mT, _rows(states[:, :-1]).to(kind))
    return dx, d_input, d_state, db


def _rows(x: Tensor) -> Tensor:
    """Return x [c, T, b, i] as a matrix for each client, [c, T * b, i]."""
    return x.flatten(1, 2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the float32 product of each client's matrices."""
    return torch.bmm(a, b) if a.dtype == torch.float32 else torch.bmm(a, b, out_dtype=torch.float32)


def _factor_type(like: Tensor, precision: str) -> torch.dtype:
    """Return the type of factors. The interpreter has no bfloat16 and uses float32."""
    return torch.bfloat16 if precision == "bf16" and like.is_cuda else torch.float32


def _float32_products(precision: str) -> str:
    """Return Triton's name for products of float32 factors; it is ignored for bfloat16."""
    return "tf32" if precision == "bf16" else precision


for _operation in (_lstm, _lstm_states, _lstm_backward):
    merge_mapped_axis(_operation)


class _LayerBackward(NoSecondDerivative):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        parts = (part.unsqueeze(0) for part in arguments[:7])
        return tuple(part.squeeze(0) for part in _lstm_backward(*parts, *arguments[7:]))


class _Layer(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, of_input: Tensor, of_state: Tensor, bias_1: Tensor, bias_2: Tensor, precision: str
    ) -> tuple[Tensor, ...]:
        parts = (part.unsqueeze(0) for part in (x, of_input, of_state, bias_1, bias_2))
        return tuple(part.squeeze(0) for part in _lstm(*parts, precision))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        states, gates, memories, factors = output
        ctx.save_for_backward(*inputs[:3], factors if factors.numel() else states, gates, memories)
        ctx.precision = inputs[5]

    @staticmethod
    def backward(ctx: Any, g: Tensor, *others: Tensor) -> Any:
        wants_input = ctx.needs_input_grad[0]
        dx, d_input, d_state, db = apply(_LayerBackward, g, *ctx.saved_tensors, wants_input, ctx.precision)
        return dx if wants_input else None, d_input, d_state, db, db, None


def _takes(x: Tensor, of_input: Tensor, of_state: Tensor, bias_1: Tensor, bias_2: Tensor) -> bool:
    """Whether kernels take this layer: float32 on a GPU, and of ordinary shapes."""
    if not client_axis.available(x) or x.dim() != 3 or min(x.shape) == 0 or of_state.dim() != 2:
        return False
    hidden = of_state.shape[1]
    fits = of_input.shape == (4 * hidden, x.shape[2]) and of_state.shape == (4 * hidden, hidden) and hidden > 0
    fits = fits and bias_1.shape == bias_2.shape == (4 * hidden,)
    return fits and x.shape[0] * x.shape[1] * 4 * hidden < MOST_ELEMENTS


@fast(lstm.lstm_layer, when=_takes)
def layer(x: Tensor, of_input: Tensor, of_state: Tensor, bias_1: Tensor, bias_2: Tensor) -> Tensor:
    """Return the states [length, b, h] of an LSTM layer for x [length, b, i], by kernels."""
    given = x, of_input, of_state, bias_1, bias_2
    states: Tensor
    if any(map(has_gradient, given)):
        states = apply(_Layer, *given, products())[0]
    else:
        states = _lstm_states(*(one.unsqueeze(0) for one in given), products()).squeeze(0)
    return states
