"""Whole parameter vectors with a client axis: their parts, steps of SGD along gradients in parts, and Adam.

As in `client_axis`: written for one client, and under `torch.func.vmap` one kernel for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from pefll.backend import client_axis
from pefll.backend.mapped import NoSecondDerivative, apply, mapped_over, merge_mapped_axis, packed
from pefll.backend.recorded import is_differentiated
from pefll.core import derivatives
from pefll.core.reference import fast
from pefll.models import network

MOST_PARTS = 128  # of a vector, for each of which a kernel has a line
# Of a vector in parts, whose elements kernels count with 32 bits, also some blocks beyond its end.
MOST_ELEMENTS = (1 << 31) - (1 << 22)


def splits(vector: Tensor, parts: int) -> bool:
    """Return whether kernels take a vector [D] in so many parts."""
    return client_axis.available(vector) and parts <= MOST_PARTS and vector.numel() < MOST_ELEMENTS


# The operations, all with a client axis but the server's, which are its norm and Adam.


@custom_op("pefll::join", mutates_args=())
def _join(parts: list[Tensor]) -> Tensor:
    """Return parts [c, ...] as one vector for each client, [c, D]."""
    from pefll.backend.kernels import vectors

    return vectors.join([packed(part) for part in parts])


@custom_op("pefll::sgd", mutates_args=())
def _sgd(
    theta: Tensor,
    velocity: Tensor | None,
    gradient: list[Tensor],
    active: Tensor | None,
    lr: float,
    momentum: float,
    decay: float,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity, each [c, D], after one step along a gradient in parts [c, ...]."""
    from pefll.backend.kernels import vectors

    speed = None if velocity is None else packed(velocity)
    along = [packed(part) for part in gradient]
    chosen = None if active is None else active.contiguous()
    return vectors.sgd(packed(theta), speed, along, chosen, lr, momentum, decay, clip)


@custom_op("pefll::sgd_in_place", mutates_args=("theta", "velocity"))
def _sgd_in_place(
    theta: Tensor,
    velocity: Tensor,
    gradient: list[Tensor],
    active: Tensor | None,
    lr: float,
    momentum: float,
    decay: float,
    clip: float | None,
) -> None:
    """Do the same to parameters and velocity [c, D] where they lie."""
    from pefll.backend.kernels import vectors

    at, speed = packed(theta), packed(velocity)
    along = [packed(part) for part in gradient]
    chosen = None if active is None else active.contiguous()
    vectors.sgd(at, speed, along, chosen, lr, momentum, decay, clip, in_place=True)
    for given, changed in ((theta, at), (velocity, speed)):
        if changed is not given:
            given.copy_(changed)


merge_mapped_axis(_join)
merge_mapped_axis(_sgd)
merge_mapped_axis(_sgd_in_place, written=frozenset({0, 1}))


@custom_op("pefll::norm", mutates_args=())
def _norm(parts: list[Tensor]) -> Tensor:
    """Return the norm [] of parts seen as one vector; the server's, so there is no client axis."""
    from pefll.backend.kernels import vectors

    return vectors.norm([part.contiguous() for part in parts])


@custom_op("pefll::adam", mutates_args=())
def _adam(
    parameters: Tensor,
    gradient: list[Tensor],
    first: Tensor,
    second: Tensor,
    step: Tensor,
    scale: Tensor | None,
    lr: float,
    decay: float,
    first_decay: float,
    second_decay: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameters and moments [D] after one step; the server's, so there is no client axis."""
    from pefll.backend.kernels import vectors

    p, m, v = (part.contiguous() for part in (parameters, first, second))
    along = [part.contiguous() for part in gradient]
    return vectors.adam(p, along, m, v, step, scale, lr, decay, first_decay, second_decay, epsilon)


@custom_op("pefll::adam_in_place", mutates_args=("parameters", "first", "second"))
def _adam_in_place(
    parameters: Tensor,
    gradient: list[Tensor],
    first: Tensor,
    second: Tensor,
    step: Tensor,
    scale: Tensor | None,
    lr: float,
    decay: float,
    first_decay: float,
    second_decay: float,
    epsilon: float,
) -> None:
    """Do the same to contiguous parameters and moments [D] where they lie."""
    from pefll.backend.kernels import vectors

    numbers = (lr, decay, first_decay, second_decay, epsilon)
    along = [part.contiguous() for part in gradient]
    vectors.adam(parameters, along, first, second, step, scale, *numbers, in_place=True)


# For one client, with gradients.


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
        theta: Tensor, velocity: Tensor | None, active: Tensor | None, numbers: list[float | None], *parts: Tensor
    ) -> Any:
        at, speed, chosen = (None if one is None else one.unsqueeze(0) for one in (theta, velocity, active))
        after = _sgd(at, speed, [part.unsqueeze(0) for part in parts], chosen, *numbers)
        return tuple(part.squeeze(0) for part in after)


@fast(network.split, when=lambda vector, sizes: splits(vector, len(sizes)))
def split(vector: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return consecutive parts of a vector [D]; their gradients are joined by one kernel."""
    parts: tuple[Tensor, ...] = apply(_Split, vector, sizes)
    return parts


def sgd(
    theta: Tensor,
    velocity: Tensor | None,
    gradient: tuple[Tensor, ...],
    active: Tensor | None,
    *numbers: float | None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity [D] after one step of SGD.

    Args:
        theta: [D].
        velocity: [D]; None where it is zero.
        gradient: consecutive parts, of any shapes, of a vector [D].
        active: bool [], whether the parameters move at all; None if they do.
        numbers: those of `pefll.methods.optim.SGD`.
        in_place: whether to write to `theta` and `velocity`. They are left as they are where that cannot be: before the
            first step, where somebody differentiates, and where clients would have to share one of them.
    """
    if in_place and velocity is not None and _can_overwrite(theta, velocity, (*gradient, active)):
        parts = [part.unsqueeze(0) for part in gradient]
        chosen = None if active is None else active.unsqueeze(0)
        _sgd_in_place(theta.unsqueeze(0), velocity.unsqueeze(0), parts, chosen, *numbers)
        return theta, velocity
    result: tuple[Tensor, Tensor] = apply(_SGD, theta, velocity, active, list(numbers), *gradient)
    return result


def _can_overwrite(theta: Tensor, velocity: Tensor, others: tuple[Tensor | None, ...]) -> bool:
    """Whether both vectors can hold a step's result: nobody differentiates, and each client has vectors of its own."""
    given = [theta, velocity, *(other for other in others if other is not None)]
    if any(is_differentiated(one) for one in given):
        return False
    wanted = frozenset().union(*(mapped_over(one) for one in given))
    return mapped_over(theta) == mapped_over(velocity) == wanted


def norm(gradient: tuple[Tensor, ...]) -> Tensor:
    """Return the norm [] of parts, of any shapes, seen as one vector; the server's, so there is no client axis."""
    result: Tensor = _norm(list(gradient))
    return result


def adam(
    parameters: Tensor,
    gradient: tuple[Tensor, ...],
    first: Tensor,
    second: Tensor,
    *numbers: Tensor | float | None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameters and moments [D] after one step of Adam; the arguments are those of `_adam`, in its order.

    The gradient is in consecutive parts, of any shapes.

    In place they are written to where they were, if that is contiguous.
    """
    old = (parameters, first, second)
    if in_place and all(part.is_contiguous() for part in old):
        _adam_in_place(parameters, list(gradient), first, second, *numbers)
        return old
    result: tuple[Tensor, Tensor, Tensor] = _adam(parameters, list(gradient), first, second, *numbers)
    return result


@fast(
    derivatives.network_vjp, when=lambda network, function, parameters, *inputs: splits(parameters, len(network.names))
)
def network_vjp(network: Any, function: Callable[..., Tensor], parameters: Tensor, *inputs: Tensor) -> tuple[Any, Any]:
    """Do as the reference, with respect to the parameters in parts, so that their gradient is not copied together."""
    return torch.func.vjp(function, network.in_parts(parameters), *inputs)  # type: ignore[return-value]
