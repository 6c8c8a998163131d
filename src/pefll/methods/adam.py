"""The server's Adam, on flat vectors and without Python numbers that change: a CUDA graph can hold it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pefll.ops import client_axis

FIRST_DECAY, SECOND_DECAY, EPSILON = 0.9, 0.999, 1e-8


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
    count = step.to(parameters.dtype)
    # As tensors, so that `pow` has the parameters' precision on every device.
    unbias_first = 1 - torch.full_like(count, FIRST_DECAY) ** count
    unbias_second = 1 - torch.full_like(count, SECOND_DECAY) ** count
    # In place on what was made here: a hypernetwork's vectors are long, and memory is slow.
    first = (FIRST_DECAY * moments.first).add_(gradient, alpha=1 - FIRST_DECAY)
    second = (SECOND_DECAY * moments.second).addcmul_(gradient, gradient, value=1 - SECOND_DECAY)
    change = first / (second / unbias_second).sqrt_().add_(EPSILON)
    return parameters - change.mul_(lr / unbias_first), Moments(first, second)
