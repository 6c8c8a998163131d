"""Optimisers of flat vectors in plain torch: SGD of clients, and Adam of the server.

A function marked as a reference may have faster versions in `pefll.backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pefll.core.derivatives import gradient
from pefll.core.errors import PefllError
from pefll.core.reference import reference
from pefll.core.tree import Tree, map_tree
from pefll.models.network import Parameters


class SGD(NamedTuple):
    """Hyper-parameters of SGD. They mean the same as in torch.

    Attributes:
        lr: learning rate; a tensor [] if it follows a schedule.
        momentum: factor of the previous velocity, without dampening.
        decay: weight decay, added to the gradient after clipping.
        clip: maximum norm of the gradient; None for no clipping.
        proximal: μ of the proximal term μ/2 ‖θ - θ₀‖². Its gradient is added after clipping, as the weight decay is.
    """

    lr: float | Tensor
    momentum: float = 0.9
    decay: float = 0.0
    clip: float | None = 50.0
    proximal: float = 0.0


def clipped(gradient: Tensor, limit: float | None) -> Tensor:
    """Return the gradient, scaled so that its norm is at most `limit`."""
    if limit is None:
        return gradient
    return gradient * shrinkage(torch.linalg.vector_norm(gradient), limit)


def shrinkage(norm: Tensor, limit: float) -> Tensor:
    """Return the factor, at most 1, that brings a norm [] down to `limit`."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


@reference
def sgd_on_loss(
    loss: Callable[[Tensor, Any], Tensor],
    theta: Tensor,
    batches: Iterable[Any],
    sgd: SGD,
    steps: Tensor | None = None,
    towards: Tensor | None = None,
) -> Tensor:
    """Return the parameters [D] after one step of SGD on each batch.

    Args:
        loss: maps parameters [D] and a batch to a loss [].
        theta: initial parameters [D].
        batches: one batch per step.
        sgd: hyper-parameters.
        steps: see `sgd_along`.
        towards: see `sgd_along`.
    """
    return sgd_along(lambda at, batch: gradient(loss, at, batch), theta, batches, sgd, steps, towards)


@reference
def sgd_along(
    direction: Callable[[Tensor, Any], Tensor],
    theta: Tensor,
    batches: Iterable[Any],
    sgd: SGD,
    steps: Tensor | None = None,
    towards: Tensor | None = None,
) -> Tensor:
    """Return the parameters [D] after one step of SGD for each batch, along a given direction.

    Args:
        direction: maps parameters [D] and a batch to a gradient [D], or to an estimate of it. It must not store the
            parameters, because later steps may overwrite them.
        theta: initial parameters [D].
        batches: one batch per step.
        sgd: hyper-parameters.
        steps: int64 [], number of steps to take; None for all batches. Clients of one `vmap` get the same number of
            batches, but each client stops after its own number of steps.
        towards: θ₀ [D] of the proximal term, which has the weight `sgd.proximal`; None for the initial parameters.
    """
    velocity, anchor = torch.zeros_like(theta), theta if towards is None else towards
    for i, batch in enumerate(batches):
        moved, velocity = sgd_step(theta, velocity, direction(theta, batch), sgd, anchor)
        theta = moved if steps is None else torch.where(i < steps, moved, theta)
    return theta


@reference
def sgd_step(
    theta: Tensor, velocity: Tensor, gradient: Tensor, sgd: SGD, towards: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity, each [D], after one step along a gradient [D].

    `towards` is θ₀ [D] of the proximal term; without it, there is no such term.
    """
    velocity = sgd.momentum * velocity + clipped(gradient, sgd.clip) + sgd.decay * theta
    if sgd.proximal and towards is not None:
        velocity = velocity + sgd.proximal * (theta - towards)
    return theta - sgd.lr * velocity, velocity


class Adam(NamedTuple):
    """Hyper-parameters of the server's optimiser. They mean the same as in torch.

    Attributes:
        lr: learning rate; a tensor [] if it follows a schedule.
        decay: weight decay, added to the gradient.
        first_decay: β₁, decay of the first moment.
        second_decay: β₂, decay of the second moment.
        epsilon: added to the square root of the second moment.
    """

    lr: float | Tensor
    decay: float = 0.0
    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-8


class Moments(NamedTuple):
    """Adam's running means of the gradient and of its square; both have the shape of the parameters."""

    first: Tensor
    second: Tensor


def no_moments(parameters: Tensor) -> Moments:
    """Return the moments before the first step."""
    return Moments(torch.zeros_like(parameters), torch.zeros_like(parameters))


class NoMean(NamedTuple):
    """Stands in a state for a running mean that is switched off."""


def move_mean(mean: Tree, values: Tree, step: Tensor, decay: float) -> Tree:
    """Return the running mean of parameters after one more step; NoMean does not change.

    Args:
        mean: a NamedTuple of tensors, or NoMean.
        values: the newest parameters, a NamedTuple like `mean`.
        step: int64 [], number t of the step; 1 for the first step.
        decay: less than 1. Step t uses t / (t + 9) if that is less, so that the mean forgets its start.
    """
    if isinstance(mean, NoMean):
        return mean
    count = step.to(mean[0].dtype)
    change = 1 - (count / (count + 9)).clamp(max=decay)
    return map_tree(lambda old, new: torch.lerp(old, new, change), mean, values)


def parts_of(gradient: Parameters) -> tuple[Tensor, ...]:
    """Return the consecutive parts of a gradient; for a vector, only the vector itself."""
    return (gradient,) if isinstance(gradient, Tensor) else tuple(gradient.values())


def as_vector(gradient: Parameters) -> Tensor:
    """Return a gradient as one vector [D]."""
    return gradient if isinstance(gradient, Tensor) else torch.cat([part.flatten() for part in parts_of(gradient)])


@reference
def norm(*gradients: Parameters) -> Tensor:
    """Return the norm [] of the vector of all gradients. Each gradient is a vector, or tensors by name."""
    norms = [torch.linalg.vector_norm(part) for gradient in gradients for part in parts_of(gradient)]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


def clip_factor(limit: float, *gradients: Parameters) -> Tensor | None:
    """Return the factor [] that clips the vector of all gradients to the norm `limit`; None if `limit` is 0."""
    return shrinkage(norm(*gradients), limit) if limit else None


@reference
def adam(
    parameters: Tensor,
    gradient: Parameters,
    moments: Moments,
    step: Tensor,
    settings: Adam,
    scale: Tensor | None = None,
) -> tuple[Tensor, Moments]:
    """Return parameters and moments after one step of Adam. The inputs may be overwritten: do not read them again.

    Args:
        parameters: [D].
        gradient: [D], or tensors by name.
        moments: moments after the previous step.
        step: int64 [], number of the step; 1 for the first step.
        settings: hyper-parameters.
        scale: factor [] of the gradient; None for 1.
    """
    gradient = as_vector(gradient)
    if gradient.numel() != parameters.numel():
        raise PefllError(
            f"the gradient has {gradient.numel()} numbers, but there are {parameters.numel()} parameters",
            code="PEFLL-S003",
        )
    lr, decay, first_decay, second_decay, epsilon = settings
    if scale is not None:
        gradient = scale * gradient
    if decay:
        gradient = gradient + decay * parameters
    count = step.to(parameters.dtype)
    # The bases are tensors, so that powers have the precision of the parameters on every device.
    unbias_first = 1 - torch.full_like(count, first_decay) ** count
    unbias_second = 1 - torch.full_like(count, second_decay) ** count
    # Operations change new tensors in place: a hypernetwork's vectors are long, so each copy would cost time.
    first = (first_decay * moments.first).add_(gradient, alpha=1 - first_decay)
    second = (second_decay * moments.second).addcmul_(gradient, gradient, value=1 - second_decay)
    change = first / (second / unbias_second).sqrt_().add_(epsilon)
    return parameters - change.mul_(lr / unbias_first), Moments(first, second)
