"""What a client does to a model it is given: k steps of SGD. Written once, used by every method."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim.sgd import sgd as torch_sgd

from pefll.backend import client_axis, recorded, vectors
from pefll.backend.alone import gradient, is_constant
from pefll.data.client import Batches

# A gradient [D], or its consecutive parts, of any shapes.
Gradient: TypeAlias = Tensor | tuple[Tensor, ...]


class SGD(NamedTuple):
    """Hyper-parameters of a client's optimiser, with torch's meaning of each.

    Attributes:
        lr: learning rate.
        momentum: of the velocity, without dampening.
        decay: weight decay, added to the gradient after clipping.
        clip: the gradient's norm is cut to this; None for no cut.
    """

    lr: float
    momentum: float = 0.9
    decay: float = 0.0
    clip: float | None = 50.0


def clipped(gradient: Tensor, limit: float | None) -> Tensor:
    """Return the gradient, scaled so that its norm is at most `limit`."""
    if limit is None:
        return gradient
    return gradient * shrinkage(torch.linalg.vector_norm(gradient), limit)


def shrinkage(norm: Tensor, limit: float) -> Tensor:
    """Return the factor, at most 1, that brings a norm [] down to `limit`."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def descend(
    loss: Callable[[Tensor, Any], Tensor],
    theta: Tensor,
    batches: Iterable[Any],
    sgd: SGD,
    steps: Tensor | None = None,
) -> Tensor:
    """Return the parameters after one step of SGD on each batch; see `follow`.

    Args:
        loss: of parameters [D] and a batch.
        theta: [D].
        batches: one per step.
        sgd: hyper-parameters.
        steps: int64 [], after how many batches to stop.

    Returns:
        [D].
    """
    return follow(lambda at, batch: gradient(loss, at, batch), theta, batches, sgd, steps)


def follow(
    direction: Callable[[Tensor, Any], Gradient],
    theta: Tensor,
    batches: Iterable[Any],
    sgd: SGD,
    steps: Tensor | None = None,
) -> Tensor:
    """Return the parameters after one step of SGD for each batch, along whatever stands for the gradient.

    Args:
        direction: of parameters [D] and a batch, [D] or parts of it; the gradient of a loss, or an estimate of one. It
            keeps nothing of the parameters, which later steps write to.
        theta: [D].
        batches: one per step.
        sgd: hyper-parameters.
        steps: int64 [], after how many batches to stop; for clients mapped together that need different numbers.

    Returns:
        [D].
    """
    if is_constant(theta):
        return _follow_alone(direction, theta, batches, sgd, None if steps is None else int(steps))

    def step(i: Tensor | int, batch: Any, at: Tensor, speed: Tensor | None) -> tuple[Tensor, Tensor]:
        active = None if steps is None else i < steps
        # Before the first step the parameters are the caller's; after it both vectors are nobody else's.
        return sgd_step(at, speed, direction(at, batch), sgd, active, last_use=speed is not None)

    # Batches that can be asked for by a number on the device; pairs of them, as Per-FedAvg's, are taken one by one.
    if isinstance(batches, Batches) and recorded.worth_recording(theta, len(batches)):
        return recorded.repeat(lambda i, *state: step(i, batches.at(i), *state), (theta, None), len(batches))[0]
    velocity: Tensor | None = None
    for i, batch in enumerate(recorded.rehearsed(batches)):
        theta, velocity = step(i, batch, theta, velocity)
    return theta


def sgd_step(
    theta: Tensor,
    velocity: Tensor | None,
    of_theta: Gradient,
    sgd: SGD,
    active: Tensor | None = None,
    last_use: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity [D] after one step along the gradient `of_theta`.

    Args:
        theta: [D].
        velocity: [D]; None before the first step, when it is zero.
        of_theta: [D], or parts of it.
        sgd: hyper-parameters.
        active: bool [], whether the parameters move at all; None if they do.
        last_use: whether nobody reads the parameters and the velocity that are given here again. The new ones may then
            be written in their place.
    """
    if client_axis.available(theta):
        parts = of_theta if isinstance(of_theta, tuple) else (of_theta,)
        return vectors.sgd(theta, velocity, parts, active, *sgd, in_place=last_use)
    along = clipped(_joined(of_theta), sgd.clip)
    velocity = (along if velocity is None else sgd.momentum * velocity + along) + sgd.decay * theta
    change = sgd.lr * velocity
    return theta - (change if active is None else torch.where(active, change, torch.zeros_like(change))), velocity


def _joined(gradient: Gradient) -> Tensor:
    return gradient if isinstance(gradient, Tensor) else torch.cat([part.flatten() for part in gradient])


def _follow_alone(
    direction: Callable[[Tensor, Any], Gradient], theta: Tensor, batches: Iterable[Any], sgd: SGD, steps: int | None
) -> Tensor:
    """Do the same for one client that is not mapped over: in place, on a copy of its own."""
    theta, velocity = theta.clone(), torch.zeros_like(theta)
    for batch in itertools.islice(batches, steps):
        # One vector, though layers leave parts: a norm and a step of each part cost more than joining them. The fused
        # step takes memory as it lies, whatever strides say.
        along = _clipped_alone(_joined(direction(theta, batch)), sgd.clip).contiguous()
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


def _clipped_alone(gradient: Tensor, limit: float | None) -> Tensor:
    """Do as `clipped`, but leave the gradient as it is where there is nothing to cut, as in most steps."""
    if limit is None:
        return gradient
    factor = limit / (float(torch.linalg.vector_norm(gradient)) + 1e-6)
    return gradient if factor >= 1 else gradient * factor  # also by NaN
