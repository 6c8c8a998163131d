"""Faster optimisers: in place for one client alone; on a GPU one kernel for all clients, and recorded steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.sgd import sgd as torch_sgd

from pefll.backend import client_axis, recorded, vectors
from pefll.backend.alone import gradients, is_constant
from pefll.core.derivatives import gradient
from pefll.core.reference import fast
from pefll.data.client import Batches
from pefll.methods import optim
from pefll.methods.contract import Problem
from pefll.methods.optim import SGD, Adam, Moments, as_vector, parts_of
from pefll.models.network import Parameters
from pefll.tasks import Classification

# A gradient [D], or its consecutive parts, of any shapes.
Gradient: TypeAlias = Tensor | tuple[Tensor, ...]
Direction: TypeAlias = Callable[[Tensor, Any], Gradient]


# One client alone.


def _is_alone(function: Any, theta: Tensor, *rest: Any) -> bool:
    return is_constant(theta)


@fast(optim.sgd_along, when=_is_alone)
def sgd_alone(
    direction: Direction, theta: Tensor, batches: Iterable[Any], sgd: SGD, steps: Tensor | None = None
) -> Tensor:
    """Do the steps of one client that is not mapped over: in place, on a copy of its own."""
    theta, velocity = theta.clone(), torch.zeros_like(theta)
    for batch in itertools.islice(batches, None if steps is None else int(steps)):
        # One vector, though layers leave parts: a norm and a step of each part cost more than joining them. The fused
        # step takes memory as it lies, whatever strides say.
        along = _clipped(_joined(direction(theta, batch)), sgd.clip).contiguous()
        torch_sgd(
            [theta],
            [along],
            [velocity],
            fused=theta.device.type == "cpu",  # once through memory, where single operations would go four times
            lr=sgd.lr,
            momentum=sgd.momentum,
            weight_decay=sgd.decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
    return theta


def _joined(gradient: Gradient) -> Tensor:
    return gradient if isinstance(gradient, Tensor) else torch.cat([part.flatten() for part in gradient])


def _clipped(gradient: Tensor, limit: float | None) -> Tensor:
    """Do as `optim.clipped`, but leave the gradient as it is where there is nothing to cut, as in most steps."""
    if limit is None:
        return gradient
    factor = limit / (float(torch.linalg.vector_norm(gradient)) + 1e-6)
    return gradient if factor >= 1 else gradient * factor  # also by NaN


# Many clients on a GPU.


def is_on_gpu(theta: Tensor) -> bool:
    """Return whether a client's parameters lie where steps are kernels, and may be recorded."""
    return theta.is_cuda or client_axis.available(theta)


@fast(optim.sgd_along, when=lambda direction, theta, *rest: is_on_gpu(theta))
def sgd_on_gpu(
    direction: Direction, theta: Tensor, batches: Iterable[Any], sgd: SGD, steps: Tensor | None = None
) -> Tensor:
    """Do the steps of clients that are mapped over: one kernel a step, recorded and replayed where that pays."""

    def step(i: Tensor | int, batch: Any, at: Tensor, speed: Tensor | None) -> tuple[Tensor, Tensor]:
        active = None if steps is None else i < steps
        # Before the first step the parameters are the caller's; after it both vectors are nobody else's.
        return sgd_step(at, speed, direction(at, batch), sgd, active, in_place=speed is not None)

    # Batches that can be asked for by a number on the device; pairs of them, as Per-FedAvg's, are taken one by one.
    if isinstance(batches, Batches) and recorded.worth_recording(theta, len(batches)):
        return recorded.repeat(lambda i, *state: step(i, batches.at(i), *state), (theta, None), len(batches))[0]
    velocity: Tensor | None = None
    for i, batch in enumerate(recorded.few_in_warm_up(batches)):
        theta, velocity = step(i, batch, theta, velocity)
    return theta


def sgd_step(
    theta: Tensor,
    velocity: Tensor | None,
    gradient: Gradient,
    sgd: SGD,
    active: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity [D] after one step.

    Args:
        theta: [D].
        velocity: [D]; None before the first step, when it is zero.
        gradient: [D], or parts of it.
        sgd: hyper-parameters.
        active: bool [], whether the parameters move at all; None if they do.
        in_place: whether the parameters and the velocity may be overwritten.
    """
    if client_axis.available(theta):
        parts = gradient if isinstance(gradient, tuple) else (gradient,)
        return vectors.sgd(theta, velocity, parts, active, *sgd, in_place=in_place)
    before = torch.zeros_like(theta) if velocity is None else velocity
    moved, velocity = optim.sgd_step.__wrapped__(theta, before, _joined(gradient), sgd)  # type: ignore[attr-defined]
    return (moved if active is None else torch.where(active, moved, theta)), velocity


@fast(optim.sgd_step, when=lambda theta, velocity, gradient, sgd: client_axis.available(theta))
def sgd_step_by_kernel(theta: Tensor, velocity: Tensor, gradient: Tensor, sgd: SGD) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity [D] after one step."""
    return vectors.sgd(theta, velocity, (gradient,), None, *sgd)


# Steps on the loss of a problem, whose gradient need not be joined.


def _is_problem_loss(loss: Any) -> bool:
    """Whether this is the loss of a problem as `Problem` has it, and not somebody's own."""
    return isinstance(getattr(loss, "__self__", None), Problem) and loss.__func__ is Problem.loss


@fast(optim.sgd_on_loss, when=lambda loss, theta, *rest: _is_problem_loss(loss) and is_constant(theta))
def sgd_on_loss_alone(
    loss: Any, theta: Tensor, batches: Iterable[Any], sgd: SGD, steps: Tensor | None = None
) -> Tensor:
    """Do the steps of one client alone, with gradients in parts."""
    problem: Problem = loss.__self__
    return sgd_alone(
        lambda at, batch: gradients(problem.loss, problem.model.in_parts(at), batch), theta, batches, sgd, steps
    )


@fast(optim.sgd_on_loss, when=lambda loss, theta, *rest: _is_problem_loss(loss) and client_axis.available(theta))
def sgd_on_loss_on_gpu(
    loss: Any, theta: Tensor, batches: Iterable[Any], sgd: SGD, steps: Tensor | None = None
) -> Tensor:
    """Do the steps of mapped clients, with gradients in parts where the kernel takes so many."""
    problem: Problem = loss.__self__
    return sgd_on_gpu(lambda at, batch: gradient_in_parts(problem, at, batch), theta, batches, sgd, steps)


def gradient_in_parts(problem: Problem, theta: Tensor, batch: Any) -> Gradient:
    """Return the gradient of a problem's loss in parts, shaped as the parameters; or [D], where those are too many."""
    model = problem.model
    if not vectors.splits(theta, len(model.names)):
        return problem.gradient(theta, batch)
    of_parts = _problem_gradient(problem, model.in_parts(theta), batch)
    return tuple(of_parts[name] for name in model.names)


def _problem_gradient(problem: Problem, parameters: Parameters, batch: Any) -> Any:
    if type(problem.task) is not Classification:
        return torch.func.grad(problem.loss)(parameters, batch)
    # From the scores back. From the loss back would begin with a one for each client, and with a product by it.
    scores, pull_back = torch.func.vjp(lambda at: problem.model(at, batch.x), parameters)  # type: ignore[misc]
    (of_parameters,) = pull_back(client_axis.cross_entropy_gradient(scores, batch.y, batch.weight))
    return of_parameters


@fast(
    gradient,
    when=lambda loss, theta, *rest: (
        _is_problem_loss(loss) and not is_constant(theta) and client_axis.available(theta) and len(rest) == 1
    ),
)
def gradient_of_problem(loss: Any, theta: Tensor, *arguments: Any) -> Tensor:
    """Return the gradient [D] of a problem's loss."""
    of_theta: Tensor = _problem_gradient(loss.__self__, theta, *arguments)
    return of_theta


# The server.


@fast(
    optim.norm,
    when=lambda *gradients: _splits([part for one in gradients for part in parts_of(one)]),
)
def norm(*gradients: Parameters) -> Tensor:
    """Return the norm [] of gradients seen as one vector, by one kernel."""
    return vectors.norm(tuple(part for one in gradients for part in parts_of(one)))


def _splits(parts: list[Tensor]) -> bool:
    return vectors.splits(parts[0], len(parts)) and sum(part.numel() for part in parts) < vectors.MOST_ELEMENTS


@fast(optim.adam, when=lambda parameters, gradient, *rest: _adam_takes(parameters, gradient))
def adam(
    parameters: Tensor,
    gradient: Parameters,
    moments: Moments,
    step: Tensor,
    settings: Adam,
    scale: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Do a step of Adam by one kernel; in place where the engine has the state for itself."""
    along = parts_of(gradient)
    if not vectors.splits(parameters, len(along)):
        along = (as_vector(gradient),)
    in_place = recorded.may_overwrite()
    changed, *after = vectors.adam(parameters, along, *moments, step, scale, *settings, in_place=in_place)
    return changed, Moments(*after)


def _adam_takes(parameters: Tensor, gradient: Parameters) -> bool:
    sizes = sum(part.numel() for part in parts_of(gradient))
    return client_axis.available(parameters) and sizes == parameters.numel()
