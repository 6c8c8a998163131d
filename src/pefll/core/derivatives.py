"""Derivatives of functions of parameters, for one client: transforms of `torch.func` may be at work around them."""

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
    """Return the cotangent of the output of `function`, pulled back to its input `at`, shaped as `at`."""
    _, pullback = torch.func.vjp(function, at)  # type: ignore[misc]
    (result,) = pullback(cotangent)
    return result  # type: ignore[no-any-return]


@reference
def network_vjp(network: Any, function: Callable[..., Tensor], parameters: Tensor, *inputs: Tensor) -> tuple[Any, Any]:
    """Return `function(parameters, *inputs)`, and what pulls a cotangent back to parameters and inputs.

    The gradient of the parameters may come in parts: `pefll.methods.optim` takes it either way.

    Args:
        network: the `Network` whose parameters they are.
        function: of a vector [size], or its parts by name, and the inputs.
        parameters: [size].
        inputs: of the function.
    """
    del network
    return torch.func.vjp(function, parameters, *inputs)  # type: ignore[return-value]
