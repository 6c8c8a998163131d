"""Derivatives for code that may run for one client alone, or for many at once under transforms of `torch.func`.

Alone, ordinary autograd gives the same derivatives with less work, and tensors have a layout in memory to choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def alone() -> bool:
    """Whether no transform of `torch.func` (vmap, grad, vjp) is at work here."""
    return not torch._C._are_functorch_transforms_active()


def is_constant(x: Tensor) -> bool:
    """Whether nobody differentiates with respect to x from outside, neither autograd nor a transform."""
    return alone() and not (x.requires_grad and torch.is_grad_enabled())


def gradient(loss: Callable[..., Tensor], theta: Tensor, *arguments: Any) -> Tensor:
    """Return the gradient of `loss(theta, *arguments)` with respect to theta, shaped as theta."""
    if not is_constant(theta):
        result: Tensor = torch.func.grad(loss)(theta, *arguments)
        return result
    with torch.enable_grad():  # also where somebody evaluates, and so has switched it off
        leaf = theta.detach().requires_grad_()
        return _of(loss(leaf, *arguments), leaf)


def gradients(loss: Callable[..., Tensor], parts: dict[str, Tensor], *arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradient of `loss(parts, *arguments)` with respect to each part, shaped as it.

    For one client alone: nobody differentiates from outside.
    """
    with torch.enable_grad():
        leaves = {name: part.detach().requires_grad_() for name, part in parts.items()}
        value = loss(leaves, *arguments)
        if not value.requires_grad:
            return tuple(torch.zeros_like(part) for part in parts.values())
        return torch.autograd.grad(value, tuple(leaves.values()), materialize_grads=True)


def pull_back(function: Callable[[Tensor], Tensor], at: Tensor, cotangent: Tensor) -> Tensor:
    """Return the cotangent of the output of `function`, pulled back to its input `at`, shaped as `at`."""
    if not (is_constant(at) and is_constant(cotangent)):
        _, pullback = torch.func.vjp(function, at)  # type: ignore[misc]
        (result,) = pullback(cotangent)
        return result  # type: ignore[no-any-return]
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        return _of(function(leaf), leaf, cotangent)


def _of(value: Tensor, leaf: Tensor, cotangent: Tensor | None = None) -> Tensor:
    """Return the derivative of a value with respect to a leaf, which it need not depend on, shaped as the leaf."""
    if not value.requires_grad:  # autograd refuses that, where transforms return zeros
        return torch.zeros_like(leaf, requires_grad=False)
    (of_leaf,) = torch.autograd.grad(value, leaf, cotangent, materialize_grads=True)
    return of_leaf
