"""The server's Adam, on flat vectors and without Python numbers that change: a CUDA graph can hold it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pefll.ops import client_axis

FIRST_DECAY, SECOND_DECAY, EPSILON = 0.9, 0.999, 1e-8
BLOCK = 1 << 15


class Moments(NamedTuple):
    """Adam's running means of the gradient and of its square, each shaped as the parameters."""

    first: Tensor
    second: Tensor


def no_moments(parameters: Tensor) -> Moments:
    """Return the moments before the first step."""
    return Moments(torch.zeros_like(parameters), torch.zeros_like(parameters))


def adam(parameters: Tensor, gradient: Tensor, moments: Moments, step: Tensor, lr: float) -> tuple[Tensor, Moments]:
    """Return parameters and moments after one step of Adam.

    Args:
        parameters: [D].
        gradient: [D].
        moments: from the step before.
        step: int64 [], 1 for the first step.
        lr: learning rate.
    """
    if client_axis.available(parameters):
        numbers = (FIRST_DECAY, SECOND_DECAY, EPSILON)
        changed, *after = client_axis.adam(parameters, gradient, *moments, step, lr, *numbers)
        return changed, Moments(*after)
    if parameters.device.type != "cpu":
        return _adam(parameters, gradient, moments, step, lr)
    # In blocks that stay in a core's cache from one operation to the next; a hypernetwork's weights would not.
    vectors = [torch.split(vector, BLOCK) for vector in (parameters, gradient, *moments)]
    blocks = [_adam(p, g, Moments(*m), step, lr) for p, g, *m in zip(*vectors, strict=True)]
    changed, after = zip(*blocks, strict=True)
    return torch.cat(changed), Moments(*(torch.cat(parts) for parts in zip(*after, strict=True)))


def _adam(parameters: Tensor, gradient: Tensor, moments: Moments, step: Tensor, lr: float) -> tuple[Tensor, Moments]:
    first = FIRST_DECAY * moments.first + (1 - FIRST_DECAY) * gradient
    second = SECOND_DECAY * moments.second + (1 - SECOND_DECAY) * gradient.square()
    count = step.to(parameters.dtype)
    # As tensors, so that `pow` has the parameters' precision on every device.
    unbias_first = 1 - torch.full_like(count, FIRST_DECAY) ** count
    unbias_second = 1 - torch.full_like(count, SECOND_DECAY) ** count
    change = (first / unbias_first) / ((second / unbias_second).sqrt() + EPSILON)
    return parameters - lr * change, Moments(first, second)
