"""What a client does to a model it is given: k steps of SGD. Written once, used by every method."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pefll.data.client import Batches
from pefll.ops import client_axis, recorded
from pefll.ops.alone import gradient, is_constant


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
    direction: Callable[[Tensor, Any], Tensor],
    theta: Tensor,
    batches: Iterable[Any],
    sgd: SGD,
    steps: Tensor | None = None,
) -> Tensor:
    """Return the parameters after one step of SGD for each batch, along whatever stands for the gradient.

    Args:
        direction: of parameters [D] and a batch, [D]; the gradient of a loss, or an estimate of one.
        theta: [D].
        batches: one per step.
        sgd: hyper-parameters.
        steps: int64 [], after how many batches to stop; for clients mapped together that need different numbers.

    Returns:
        [D].
    """
    if is_constant(theta):
        return _follow_alone(direction, theta, batches, sgd, None if steps is None else int(steps))
    velocity = torch.zeros_like(theta)

    def step(i: Tensor | int, batch: Any, at: Tensor, speed: Tensor) -> tuple[Tensor, Tensor]:
        return sgd_step(at, speed, direction(at, batch), sgd, None if steps is None else i < steps)

    # Batches that can be asked for by a number on the device; pairs of them, as Per-FedAvg's, are taken one by one.
    if isinstance(batches, Batches) and recorded.worth_recording(theta, len(batches)):
        return recorded.repeat(lambda i, *state: step(i, batches.at(i), *state), (theta, velocity), len(batches))[0]
    for i, batch in enumerate(batches):
        theta, velocity = step(i, batch, theta, velocity)
    return theta


def sgd_step(
    theta: Tensor, velocity: Tensor, of_theta: Tensor, sgd: SGD, active: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity [D] after one step along the gradient `of_theta` [D].

    Args:
        theta: [D].
        velocity: [D].
        of_theta: [D].
        sgd: hyper-parameters.
        active: bool [], whether the parameters move at all; None if they do.
    """
    if client_axis.available(theta):
        return client_axis.sgd(theta, velocity, of_theta, active, *sgd)
    velocity = sgd.momentum * velocity + clipped(of_theta, sgd.clip) + sgd.decay * theta
    change = sgd.lr * velocity
    return theta - (change if active is None else torch.where(active, change, torch.zeros_like(change))), velocity


def _follow_alone(
    direction: Callable[[Tensor, Any], Tensor], theta: Tensor, batches: Iterable[Any], sgd: SGD, steps: int | None
) -> Tensor:
    """Do the same for one client that is not mapped over: in place, on a copy of its own."""
    theta, velocity = theta.clone(), torch.zeros_like(theta)
    for batch in itertools.islice(batches, steps):
        of_theta = clipped(direction(theta, batch), sgd.clip)
        velocity.mul_(sgd.momentum).add_(of_theta).add_(theta, alpha=sgd.decay)
        theta.sub_(velocity, alpha=sgd.lr)
    return theta
