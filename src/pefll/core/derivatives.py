"""Derivatives with respect to parameters, for one client; they may run under `torch.func` transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pefll.core.reference import reference


@reference
def gradient(loss: Callable[..., Tensor], theta: Tensor, *arguments: Any) -> Tensor:
    """Return the gradient of `loss(theta, *arguments)` with respect to theta, shaped as theta."""
    result: Tensor = torch.func.grad(loss)(theta, *arguments)
    return result


@reference
def pull_back(function: Callable[[Tensor], Tensor], at: Tensor, cotangent: Tensor) -> Tensor:
    """Return the vector-Jacobian product of `function` at `at` with a cotangent of its output, shaped as `at`."""
    _, pullback = torch.func.vjp(function, at)  # type: ignore[misc]
    (result,) = pullback(cotangent)
    return result  # type: ignore[no-any-return]


@reference
def network_vjp(network: Any, function: Callable[..., Tensor], parameters: Tensor, *inputs: Tensor) -> tuple[Any, Any]:
    """Return `function(parameters, *inputs)`, and its vector-Jacobian product for parameters and inputs.

    The parameters, [size], belong to the `Network` `network`. Their gradient may be one vector or tensors by name;
    `pefll.methods.optim` takes both.
    """
    del network
    return torch.func.vjp(function, parameters, *inputs)  # type: ignore[return-value]
