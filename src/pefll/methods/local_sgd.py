"""What a client does to a model it is given: k steps of SGD. Written once, used by every method."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
    norm = gradient.square().sum().sqrt()
    return gradient * (limit / (norm + 1e-6)).clamp(max=1.0)


def descend(
    loss: Callable[[Tensor, Any], Tensor],
    theta: Tensor,
    batches: Iterable[Any],
    sgd: SGD,
    steps: Tensor | None = None,
) -> Tensor:
    """Return the parameters after one step of SGD on each batch.

    Args:
        loss: of parameters [D] and a batch.
        theta: [D].
        batches: one per step.
        sgd: hyper-parameters.
        steps: int64 [], after how many batches to stop; for clients mapped together that need different numbers.

    Returns:
        [D].
    """
    gradient_of = torch.func.grad(loss)
    velocity = torch.zeros_like(theta)
    for index, batch in enumerate(batches):
        gradient = clipped(gradient_of(theta, batch), sgd.clip) + sgd.decay * theta
        velocity = sgd.momentum * velocity + gradient
        change = sgd.lr * velocity
        if steps is not None:
            change = torch.where(index < steps, change, torch.zeros_like(change))
        theta = theta - change
    return theta
