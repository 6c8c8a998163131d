"""Derivatives with respect to the parameters of one client's model; `torch.func` can transform these functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pefll.core.reference import reference


@reference
def gradient(loss: Callable[..., Tensor], theta: Tensor, *arguments: Any) -> Tensor:
    """Return the gradient of `loss(theta, *arguments)` with respect to theta; it has theta's shape."""
    result: Tensor = torch.func.grad(loss)(theta, *arguments)
    return result


@reference
def pull_back(function: Callable[[Tensor], Tensor], at: Tensor, cotangent: Tensor) -> Tensor:
    """Return the vector-Jacobian product of `function` at the point `at` with a cotangent; it has the shape of `at`."""
    _, pullback = torch.func.vjp(function, at)  # type: ignore[misc]
    (result,) = pullback(cotangent)
    return result  # type: ignore[no-any-return]


@reference
def network_vjp(network: Any, function: Callable[..., Tensor], parameters: Tensor, *inputs: Tensor) -> tuple[Any, Any]:
    """Return `function(parameters, *inputs)`, and the function that pulls a cotangent back to parameters and inputs.

    `parameters` [size] are those of `network`, a `Network`. Their gradient is one vector, or tensors by name.
    `pefll.methods.optim` takes both forms.
    """
    del network
    return torch.func.vjp(function, parameters, *inputs)  # type: ignore[return-value]
