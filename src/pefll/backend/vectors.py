"""Operations on parameter vectors: split and join, steps of SGD with a gradient in parts, steps of Adam.

As in `client_axis`, a caller writes for one client, and under `torch.func.vmap` one kernel computes all clients. The
norm and Adam run on the server and have no client axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from pefll.backend import client_axis
from pefll.backend.alone import is_constant
from pefll.backend.mapped import (
    NoSecondDerivative,
    apply,
    mapped_over,
    maybe_packed,
    merge_mapped_axis,
    packed,
    with_client_axis,
)
from pefll.backend.recorded import is_differentiated
from pefll.core import derivatives, tree
from pefll.core.reference import fast
from pefll.methods.optim import SGD, Adam
from pefll.models import network

MOST_PARTS = 128  # limit for the parts of a vector, because a kernel has a branch for each part
# Kernels count elements with 32 bits, and their last blocks reach beyond the end of a vector.
MOST_ELEMENTS = (1 << 31) - (1 << 22)

# The arguments of a step after the vectors. They are the same for the version that overwrites the vectors.
_SGD_ARGUMENTS = (
    "Tensor[] gradient, Tensor? active, Tensor? towards, Tensor? rate, "
    "float lr, float momentum, float decay, float? clip, float proximal"
)
_ADAM_ARGUMENTS = (
    "Tensor[] gradient, Tensor step, Tensor? scale, Tensor? rate, "
    "float lr, float decay, float first_decay, float second_decay, float epsilon"
)


def splits(vector: Tensor, parts: int) -> bool:
    """Return whether kernels support a vector [D] that is split into `parts` parts."""
    return client_axis.available(vector) and parts <= MOST_PARTS and vector.numel() < MOST_ELEMENTS


@custom_op("pefll::join", mutates_args=())
def _join(parts: list[Tensor]) -> Tensor:
    """Join parts [c, ...] to one vector for each client, [c, D]."""
    from pefll.backend.kernels import vectors

    return vectors.join([packed(part) for part in parts])


@custom_op(
    "pefll::sgd", mutates_args=(), schema=f"(Tensor theta, Tensor? velocity, {_SGD_ARGUMENTS}) -> (Tensor, Tensor)"
)
def _sgd(theta: Tensor, velocity: Tensor | None, *arguments: Any) -> Any:
    """Return parameters and velocity, each [c, D], after one step; for the arguments see `_SGD_ARGUMENTS`."""
    from pefll.backend.kernels import vectors

    return vectors.sgd(packed(theta), maybe_packed(velocity), *_packed_arguments(*arguments))


def _packed_arguments(
    gradient: list[Tensor], active: Tensor | None, towards: Tensor | None, *rest: Any
) -> tuple[Any, ...]:
    """Return the arguments of a step with contiguous rows. The gradient has parts [c, ...]; `towards` is [c, D]."""
    chosen = None if active is None else active.contiguous()
    return [packed(part) for part in gradient], chosen, maybe_packed(towards), *rest


@custom_op(
    "pefll::sgd_in_place",
    mutates_args=("theta", "velocity"),
    schema=f"(Tensor(a!) theta, Tensor(b!) velocity, {_SGD_ARGUMENTS}) -> ()",
)
def _sgd_in_place(theta: Tensor, velocity: Tensor, *arguments: Any) -> None:
    """Overwrite parameters and velocity [c, D] with their values after the step."""
    from pefll.backend.kernels import vectors

    at, speed = packed(theta), packed(velocity)
    vectors.sgd(at, speed, *_packed_arguments(*arguments), in_place=True)
    for given, changed in ((theta, at), (velocity, speed)):
        if changed is not given:
            given.copy_(changed)


merge_mapped_axis(_join)
merge_mapped_axis(_sgd)
merge_mapped_axis(_sgd_in_place, written=frozenset({0, 1}))


@custom_op("pefll::norm", mutates_args=())
def _norm(parts: list[Tensor]) -> Tensor:
    """Return the norm [] of all parts joined to one vector."""
    from pefll.backend.kernels import vectors

    return vectors.norm([part.contiguous() for part in parts])


@custom_op(
    "pefll::adam",
    mutates_args=(),
    schema=f"(Tensor parameters, Tensor first, Tensor second, {_ADAM_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _adam(parameters: Tensor, first: Tensor, second: Tensor, gradient: list[Tensor], *numbers: Any) -> Any:
    """Return parameters and moments [D] after one step."""
    from pefll.backend.kernels import vectors

    p, m, v = (part.contiguous() for part in (parameters, first, second))
    return vectors.adam(p, [part.contiguous() for part in gradient], m, v, *numbers)


@custom_op(
    "pefll::adam_in_place",
    mutates_args=("parameters", "first", "second"),
    schema=f"(Tensor(a!) parameters, Tensor(b!) first, Tensor(c!) second, {_ADAM_ARGUMENTS}) -> ()",
)
def _adam_in_place(parameters: Tensor, first: Tensor, second: Tensor, gradient: list[Tensor], *numbers: Any) -> None:
    """Overwrite contiguous parameters and moments [D] with their values after one step."""
    from pefll.backend.kernels import vectors

    vectors.adam(parameters, [part.contiguous() for part in gradient], first, second, *numbers, in_place=True)


class _Join(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*parts: Tensor) -> Tensor:
        joined: Tensor = _join([part.unsqueeze(0) for part in parts])
        return joined.squeeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.sizes = [part.numel() for part in inputs]

    @staticmethod
    def backward(ctx: Any, joined: Tensor) -> Any:
        return split(joined, ctx.sizes)


class _Split(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(vector: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return torch.split(vector, sizes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> Any:
        return apply(_Join, *parts), None


class _SGD(NoSecondDerivative):
    @staticmethod
    def forward(
        theta: Tensor,
        velocity: Tensor | None,
        active: Tensor | None,
        towards: Tensor | None,
        rate: Tensor | None,
        numbers: list[float | None],
        *parts: Tensor,
    ) -> Any:
        at, speed, *rest = (with_client_axis(one) for one in (theta, velocity, active, towards, rate))
        after = _sgd(at, speed, [part.unsqueeze(0) for part in parts], *rest, *numbers)
        return tuple(part.squeeze(0) for part in after)


@fast(tree.rows_are_finite, when=lambda rows: rows.is_cuda)
def rows_are_finite_on_gpu(rows: Tensor) -> Tensor:
    """Return which rows of [n, m] have only finite numbers, bool [n], by one pass over them."""
    largest: Tensor = torch.linalg.vector_norm(rows, ord=math.inf, dim=1)
    return largest < math.inf


@fast(tree.rows_are_finite, when=lambda rows: not rows.is_cuda)
def rows_are_finite_on_cpu(rows: Tensor) -> Tensor:
    """Return which rows of [n, m] have only finite numbers, bool [n]."""
    # The largest number of a row with NaN is NaN. torch.isfinite takes 20 times as long.
    return (rows.amax(dim=1) < math.inf) & (rows.amin(dim=1) > -math.inf)


@fast(network.split, when=lambda vector, sizes: splits(vector, len(sizes)))
def split(vector: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return consecutive parts of a vector [D]. In the backward pass one kernel joins the gradients of the parts."""
    parts: tuple[Tensor, ...] = apply(_Split, vector, sizes)
    return parts


def sgd(
    theta: Tensor,
    velocity: Tensor | None,
    gradient: tuple[Tensor, ...],
    active: Tensor | None,
    towards: Tensor | None,
    settings: SGD,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity [D] after one step of SGD.

    Args:
        theta: parameters [D].
        velocity: [D]; None for zeros.
        gradient: consecutive parts of a vector [D], of any shapes.
        active: bool [], whether the step changes the parameters; None for yes.
        towards: θ₀ [D] of the proximal term; None for no such term.
        settings: hyper-parameters.
        in_place: whether to overwrite `theta` and `velocity`. They are not overwritten in the first step, if something
            is differentiated, or if clients share one of the two.
    """
    rate, lr = _rate_of(settings)
    numbers = [lr, *settings[1:]]
    rest = active, towards if settings.proximal else None, rate
    if in_place and velocity is not None and _can_overwrite(theta, velocity, (*gradient, *rest)):
        parts = [part.unsqueeze(0) for part in gradient]
        chosen = (with_client_axis(one) for one in rest)
        _sgd_in_place(theta.unsqueeze(0), velocity.unsqueeze(0), parts, *chosen, *numbers)
        return theta, velocity
    result: tuple[Tensor, Tensor] = apply(_SGD, theta, velocity, *rest, numbers, *gradient)
    return result


def _rate_of(settings: SGD | Adam) -> tuple[Tensor | None, float]:
    """Return the learning rate as a tensor [] or as a number. A CUDA graph keeps numbers: a schedule needs a tensor."""
    return (settings.lr, 0.0) if isinstance(settings.lr, Tensor) else (None, settings.lr)


def _can_overwrite(theta: Tensor, velocity: Tensor, others: tuple[Tensor | None, ...]) -> bool:
    """Whether a step may overwrite both vectors: each client has its own vectors, and nothing is differentiated."""
    given = [theta, velocity, *(other for other in others if other is not None)]
    if any(is_differentiated(one) for one in given):
        return False
    wanted = frozenset().union(*(mapped_over(one) for one in given))
    return mapped_over(theta) == mapped_over(velocity) == wanted


def norm(gradient: tuple[Tensor, ...]) -> Tensor:
    """Return the norm [] of all parts, of any shapes, joined to one vector."""
    result: Tensor = _norm(list(gradient))
    return result


def adam(
    old: tuple[Tensor, Tensor, Tensor],
    gradient: tuple[Tensor, ...],
    step: Tensor,
    scale: Tensor | None,
    settings: Adam,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameters, first and second moments, each [D], after one step of Adam.

    Args:
        old: parameters, first and second moments before the step.
        gradient: consecutive parts of a vector [D], of any shapes.
        step: int64 [], number of the step; 1 for the first step.
        scale: factor [] of the gradient; None for 1.
        settings: hyper-parameters.
        in_place: whether to overwrite the tensors of `old`. They are not overwritten if one is not contiguous.
    """
    rate, lr = _rate_of(settings)
    numbers = (step, scale, rate, lr, *settings[1:])
    if in_place and all(part.is_contiguous() for part in old):
        _adam_in_place(*old, list(gradient), *numbers)
        return old
    result: tuple[Tensor, Tensor, Tensor] = _adam(*old, list(gradient), *numbers)
    return result


@fast(
    derivatives.network_vjp, when=lambda network, function, parameters, *inputs: splits(parameters, len(network.names))
)
def network_vjp(network: Any, function: Callable[..., Tensor], parameters: Tensor, *inputs: Tensor) -> tuple[Any, Any]:
    """Return the value and the vector-Jacobian product. The parameters' gradient stays in parts and is not copied."""
    return torch.func.vjp(function, network.in_parts(parameters), *inputs)  # type: ignore[return-value]


def _vjp_is_alone(network: Any, function: Any, parameters: Tensor, *inputs: Tensor) -> bool:
    return parameters.device.type == "cpu" and all(map(is_constant, (parameters, *inputs)))


@fast(derivatives.network_vjp, when=_vjp_is_alone)
def network_vjp_alone(
    network: Any, function: Callable[..., Tensor], parameters: Tensor, *inputs: Tensor
) -> tuple[Any, Any]:
    """Return the value and the vector-Jacobian product, without the import of `torch.func`, which takes a second."""
    del network
    leaves = [value.detach().requires_grad_() for value in (parameters, *inputs)]
    with torch.enable_grad():
        value = function(*leaves)

    def pull(cotangent: Tensor) -> tuple[Tensor, ...]:
        if not value.requires_grad:
            return tuple(map(torch.zeros_like, (parameters, *inputs)))
        return torch.autograd.grad(value, leaves, cotangent, retain_graph=True, materialize_grads=True)

    return value.detach(), pull
