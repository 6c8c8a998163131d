"""The server's Adam, on flat vectors and without Python numbers that change: a CUDA graph can hold it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pefll.backend import client_axis, vectors
from pefll.backend.recorded import may_overwrite
from pefll.core.errors import PefllError
from pefll.models.network import Parameters


class Adam(NamedTuple):
    """Hyper-parameters of the server's optimiser, with torch's meaning of each.

    Attributes:
        lr: learning rate.
        decay: weight decay, added to the gradient.
        first_decay: β₁.
        second_decay: β₂.
        epsilon: added to the root of the second moment.
    """

    lr: float
    decay: float = 0.0
    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-8


class Moments(NamedTuple):
    """Adam's running means of the gradient and of its square, each shaped as the parameters."""

    first: Tensor
    second: Tensor


def no_moments(parameters: Tensor) -> Moments:
    """Return the moments before the first step."""
    return Moments(torch.zeros_like(parameters), torch.zeros_like(parameters))


def norm(*gradients: Parameters) -> Tensor:
    """Return the norm [] of gradients, each a vector or in parts, seen as one vector."""
    every = [part for gradient in gradients for part in parts(gradient)]
    if vectors.splits(every[0], len(every)) and sum(part.numel() for part in every) < vectors.MOST_ELEMENTS:
        return vectors.norm(tuple(every))
    whole: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in every]))
    return whole


def parts(gradient: Parameters) -> tuple[Tensor, ...]:
    """Return the consecutive parts of a gradient; a vector is one."""
    return (gradient,) if isinstance(gradient, Tensor) else tuple(gradient.values())


def joined(gradient: Parameters) -> Tensor:
    """Return a gradient as one vector [D]."""
    return gradient if isinstance(gradient, Tensor) else torch.cat([part.flatten() for part in parts(gradient)])


def adam(
    parameters: Tensor,
    gradient: Parameters,
    moments: Moments,
    step: Tensor,
    settings: Adam,
    scale: Tensor | None = None,
    last_use: bool = False,
) -> tuple[Tensor, Moments]:
    """Return parameters and moments after one step of Adam.

    Args:
        parameters: [D].
        gradient: [D], or its parts by name, which `Network.separate` gives where kernels take them.
        moments: from the step before.
        step: int64 [], 1 for the first step.
        settings: hyper-parameters.
        scale: [], by which the gradient is multiplied first; None for 1.
        last_use: whether nobody reads the parameters and moments that are given here again. Where an engine has them
            for itself, the new ones may then be written in their place.
    """
    along = parts(gradient)
    size = sum(part.numel() for part in along)
    if size != parameters.numel():
        raise PefllError(
            f"a gradient of {size} numbers cannot be that of {parameters.numel()} parameters", code="PEFLL-S003"
        )
    if client_axis.available(parameters):
        in_place = last_use and may_overwrite()
        if not vectors.splits(parameters, len(along)):
            along = (joined(gradient),)
        changed, *after = vectors.adam(parameters, along, *moments, step, scale, *settings, in_place=in_place)
        return changed, Moments(*after)
    gradient = joined(gradient)
    lr, decay, first_decay, second_decay, epsilon = settings
    if scale is not None:
        gradient = scale * gradient
    if decay:
        gradient = gradient + decay * parameters
    count = step.to(parameters.dtype)
    # As tensors, so that `pow` has the parameters' precision on every device.
    unbias_first = 1 - torch.full_like(count, first_decay) ** count
    unbias_second = 1 - torch.full_like(count, second_decay) ** count
    # In place on what was made here: a hypernetwork's vectors are long, and memory is slow.
    first = (first_decay * moments.first).add_(gradient, alpha=1 - first_decay)
    second = (second_decay * moments.second).addcmul_(gradient, gradient, value=1 - second_decay)
    change = first / (second / unbias_second).sqrt_().add_(epsilon)
    return parameters - change.mul_(lr / unbias_first), Moments(first, second)
