"""Faster optimisers: in-place steps for a single client, and on a GPU one kernel per step for all clients."""

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
from pefll.tasks.classification import is_cross_entropy

# A gradient [D], or a tuple of its consecutive parts, of any shapes.
Gradient: TypeAlias = Tensor | tuple[Tensor, ...]
Direction: TypeAlias = Callable[[Tensor, Any], Gradient]


# A single client, outside of `torch.func` transforms.


def _is_alone(function: Any, theta: Tensor, *rest: Any) -> bool:
    return is_constant(theta)


@fast(optim.sgd_along, when=_is_alone)
def sgd_alone(
    direction: Direction,
    theta: Tensor,
    batches: Iterable[Any],
    sgd: SGD,
    steps: Tensor | None = None,
    towards: Tensor | None = None,
) -> Tensor:
    """Return the parameters after the steps of a single client. The steps change a copy of `theta` in place."""
    anchor = theta if towards is None else towards
    theta, velocity, lr = theta.clone(), torch.zeros_like(theta), float(sgd.lr)
    for batch in itertools.islice(batches, None if steps is None else int(steps)):
        # Joining the parts costs less than a norm and a step for each part. The gradient must be contiguous, because
        # the fused step ignores strides.
        along = _clipped(_joined(direction(theta, batch)), sgd.clip).contiguous()
        if sgd.proximal:
            along = along.add(theta - anchor, alpha=sgd.proximal)
        torch_sgd(
            [theta],
            [along],
            [velocity],
            fused=theta.device.type == "cpu",  # a fused step reads memory once instead of four times
            lr=lr,
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
    """Return the gradient, scaled so that its norm is at most `limit`. Most steps need no scaling and no copy."""
    if limit is None:
        return gradient
    factor = limit / (float(torch.linalg.vector_norm(gradient)) + 1e-6)
    return gradient if factor >= 1 else gradient * factor  # if the norm is NaN, so is the result


# Many clients on a GPU.


def is_on_gpu(theta: Tensor) -> bool:
    """Return whether a client's parameters are on a device with kernels and CUDA graphs."""
    return theta.is_cuda or client_axis.available(theta)


@fast(optim.sgd_along, when=lambda direction, theta, *rest: is_on_gpu(theta))
def sgd_on_gpu(
    direction: Direction,
    theta: Tensor,
    batches: Iterable[Any],
    sgd: SGD,
    steps: Tensor | None = None,
    towards: Tensor | None = None,
) -> Tensor:
    """Return the parameters after the steps of mapped clients: one kernel per step, or a CUDA graph of many steps."""
    anchor = theta if towards is None else towards

    def step(i: Tensor | int, batch: Any, at: Tensor, speed: Tensor | None) -> tuple[Tensor, Tensor]:
        active = None if steps is None else i < steps
        # The first step must not overwrite the caller's parameters. Later steps overwrite vectors that were made here.
        return sgd_step(at, speed, direction(at, batch), sgd, active, anchor, in_place=speed is not None)

    # In a graph, an index on the device must select the batch. That does not work for Per-FedAvg's pairs of batches.
    if isinstance(batches, Batches) and recorded.worth_capturing(theta, len(batches)):
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
    towards: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity [D] after one step.

    Args:
        theta: parameters [D].
        velocity: [D]; None for zeros, before the first step.
        gradient: [D], or a tuple of its parts.
        sgd: hyper-parameters.
        active: bool [], whether the step changes the parameters; None for yes.
        towards: θ₀ [D] of the proximal term; None for no such term.
        in_place: whether the parameters and the velocity may be overwritten.
    """
    if client_axis.available(theta):
        parts = gradient if isinstance(gradient, tuple) else (gradient,)
        return vectors.sgd(theta, velocity, parts, active, towards, sgd, in_place=in_place)
    before = torch.zeros_like(theta) if velocity is None else velocity
    plain = optim.sgd_step.__wrapped__  # type: ignore[attr-defined]
    moved, velocity = plain(theta, before, _joined(gradient), sgd, towards)
    return (moved if active is None else torch.where(active, moved, theta)), velocity


@fast(optim.sgd_step, when=lambda theta, *rest: client_axis.available(theta))
def sgd_step_by_kernel(
    theta: Tensor, velocity: Tensor, gradient: Tensor, sgd: SGD, towards: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity [D] after one step."""
    return vectors.sgd(theta, velocity, (gradient,), None, towards, sgd)


# Steps on the loss of a problem. The gradient comes in parts: one tensor for each parameter.


def _is_problem_loss(loss: Any) -> bool:
    """Whether a loss is `Problem.loss` itself, and not a user's function or override."""
    return isinstance(getattr(loss, "__self__", None), Problem) and loss.__func__ is Problem.loss


@fast(optim.sgd_on_loss, when=lambda loss, theta, *rest: _is_problem_loss(loss) and is_constant(theta))
def sgd_on_loss_alone(
    loss: Any,
    theta: Tensor,
    batches: Iterable[Any],
    sgd: SGD,
    steps: Tensor | None = None,
    towards: Tensor | None = None,
) -> Tensor:
    """Return the parameters after the steps of a single client, with gradients in parts."""
    problem: Problem = loss.__self__

    def direction(at: Tensor, batch: Any) -> Gradient:
        return gradients(problem.loss, problem.model.in_parts(at), batch)

    return sgd_alone(direction, theta, batches, sgd, steps, towards)


@fast(optim.sgd_on_loss, when=lambda loss, theta, *rest: _is_problem_loss(loss) and client_axis.available(theta))
def sgd_on_loss_on_gpu(
    loss: Any,
    theta: Tensor,
    batches: Iterable[Any],
    sgd: SGD,
    steps: Tensor | None = None,
    towards: Tensor | None = None,
) -> Tensor:
    """Return the parameters after the steps of mapped clients, with gradients in parts if there are not too many."""
    problem: Problem = loss.__self__
    return sgd_on_gpu(lambda at, batch: gradient_in_parts(problem, at, batch), theta, batches, sgd, steps, towards)


def gradient_in_parts(problem: Problem, theta: Tensor, batch: Any) -> Gradient:
    """Return the gradient of a problem's loss in parts, shaped as the parameters; [D] if there are too many parts."""
    model = problem.model
    if not vectors.splits(theta, len(model.names)):
        return problem.gradient(theta, batch)
    of_parts = _problem_gradient(problem, model.in_parts(theta), batch)
    return tuple(of_parts[name] for name in model.names)


def _problem_gradient(problem: Problem, parameters: Parameters, batch: Any) -> Any:
    """Return the gradient of a problem's loss, in parts if `parameters` are. Only cross-entropy has a kernel."""
    if not is_cross_entropy(problem.task):
        return torch.func.grad(problem.loss)(parameters, batch)
    # Start with the gradient of the scores. Starting with the loss would launch two more kernels, to multiply by 1.
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


# Steps on the server.


def _all_parts(gradients: tuple[Parameters, ...]) -> tuple[Tensor, ...]:
    return tuple(part for one in gradients for part in parts_of(one))


def _norm_takes(*gradients: Parameters) -> bool:
    parts = _all_parts(gradients)
    return vectors.splits(parts[0], len(parts)) and sum(part.numel() for part in parts) < vectors.MOST_ELEMENTS


@fast(optim.norm, when=_norm_takes)
def norm(*gradients: Parameters) -> Tensor:
    """Return the norm [] of all gradients joined to one vector, with one kernel."""
    return vectors.norm(_all_parts(gradients))


def _adam_takes(parameters: Tensor, gradient: Parameters, *rest: Any) -> bool:
    sizes = sum(part.numel() for part in parts_of(gradient))
    return client_axis.available(parameters) and sizes == parameters.numel()


@fast(optim.adam, when=_adam_takes)
def adam(
    parameters: Tensor,
    gradient: Parameters,
    moments: Moments,
    step: Tensor,
    settings: Adam,
    scale: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Return parameters and moments after one step of Adam, with one kernel; in place if the engine allows it."""
    along = parts_of(gradient)
    if not vectors.splits(parameters, len(along)):
        along = (as_vector(gradient),)
    old, in_place = (parameters, *moments), recorded.may_overwrite()
    changed, *after = vectors.adam(old, along, step, scale, settings, in_place=in_place)
    return changed, Moments(*after)
