"""A function as a layer, and whether a rewritten network computes what it did."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pefll.backend.fused import fused


class Do(nn.Module):
    """A function as a layer."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x):
        return self.function(*x)


def assert_same(module: nn.Module, *inputs: Tensor) -> nn.Module:
    """Check names, outputs and gradients in float64, where every path gives the same numbers to rounding."""
    module = copy.deepcopy(module).double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    other = fused(module)
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert list(other.state_dict()) == list(module.state_dict())
    assert all(a is b for a, b in zip(other.parameters(), module.parameters(), strict=True))
    values = {name: value.detach().clone() for name, value in module.named_parameters()}

    def loss(values, which, inputs):
        return torch.func.functional_call(which, values, inputs).square().sum()

    wanted, wanted_gradient = torch.func.grad_and_value(loss)(values, module, inputs)[::-1]
    got, got_gradient = torch.func.grad_and_value(loss)(values, other, inputs)[::-1]
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got_gradient, wanted_gradient, rtol=1e-10, atol=1e-10)
    # And with ordinary autograd, without any transform.
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    gradient = torch.autograd.grad(loss(leaves, other, inputs), list(leaves.values()), allow_unused=True)
    for ours, theirs in zip(gradient, wanted_gradient.values(), strict=True):
        torch.testing.assert_close(torch.zeros_like(theirs) if ours is None else ours, theirs, rtol=1e-10, atol=1e-10)
    return other
