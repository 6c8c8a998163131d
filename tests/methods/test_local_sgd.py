"""Local SGD for one client alone, and mapped over clients: the same steps, and torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pefll.methods.local_sgd import SGD, clipped, descend, follow

BATCHES = [torch.randn(5, generator=torch.Generator().manual_seed(seed)).double() for seed in range(6)]


def loss(theta: Tensor, batch: Tensor) -> Tensor:
    return (theta * batch).sum().cos() * 4 + theta.pow(4).sum()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("grad", [True, False])
def test_alone_mapped_and_torchs_optimiser_agree(clip, grad):
    sgd = SGD(lr=0.05, momentum=0.9, decay=0.1, clip=clip)
    theta = torch.linspace(-1, 1, 5).double()
    given = theta.clone()
    with torch.set_grad_enabled(grad):
        alone = descend(loss, theta, BATCHES, sgd)
    assert torch.equal(theta, given)  # the caller's vector is not touched
    assert not alone.requires_grad
    mapped = torch.vmap(lambda t: descend(loss, t, BATCHES, sgd))(torch.stack([theta, theta + 1]))
    torch.testing.assert_close(alone, mapped[0], rtol=1e-12, atol=1e-12)
    leaf = theta.clone().requires_grad_()
    optimiser = torch.optim.SGD([leaf], lr=0.05, momentum=0.9, weight_decay=0.1)
    for batch in BATCHES:
        optimiser.zero_grad()
        loss(leaf, batch).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([leaf], clip)
        optimiser.step()
    torch.testing.assert_close(alone, leaf.detach(), rtol=1e-10, atol=1e-10)


def test_clients_stop_after_their_own_number_of_steps():
    sgd, theta = SGD(lr=0.05), torch.linspace(-1, 1, 5).double()
    steps = torch.tensor([0, 2, 6, 9])
    mapped = torch.vmap(lambda s: descend(loss, theta, BATCHES, sgd, steps=s))(steps)
    for own, result in zip(steps, mapped, strict=True):
        torch.testing.assert_close(descend(loss, theta, BATCHES, sgd, steps=own), result, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(descend(loss, theta, BATCHES[: int(own)], sgd), result, rtol=1e-12, atol=1e-12)


def test_training_can_be_differentiated():
    """Somebody who differentiates through the steps gets the derivative, not the fast path."""
    sgd, theta = SGD(lr=0.05), torch.linspace(-1, 1, 5).double()
    wanted = torch.func.jacrev(lambda t: descend(loss, t, BATCHES[:3], sgd))(theta)
    leaf = theta.clone().requires_grad_()
    rows = [torch.autograd.grad(part, leaf, retain_graph=True)[0] for part in descend(loss, leaf, BATCHES[:3], sgd)]
    torch.testing.assert_close(torch.stack(rows), wanted, rtol=1e-10, atol=1e-10)


def test_a_gradient_that_is_one_number_everywhere():
    result = descend(lambda theta, batch: theta.sum(), torch.zeros(3), [0, 1], SGD(lr=1.0, momentum=0.0, clip=None))
    assert result.tolist() == [-2, -2, -2]


def test_clipping():
    gradient = torch.tensor([3.0, 4.0])
    assert clipped(gradient, None) is gradient
    torch.testing.assert_close(clipped(gradient, 10.0), gradient)
    torch.testing.assert_close(clipped(gradient, 1.0), gradient / 5, rtol=1e-5, atol=0)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_in_parts_are_followed_as_whole_ones(clip):
    sgd, theta = SGD(lr=0.05, momentum=0.9, decay=0.1, clip=clip), torch.linspace(-1, 1, 5).double()

    def in_parts(at: Tensor, batch: Tensor) -> tuple[Tensor, ...]:
        whole = torch.func.grad(loss)(at, batch)
        return whole[:1], whole[1:].view(2, 2)

    wanted = descend(loss, theta, BATCHES, sgd)
    torch.testing.assert_close(follow(in_parts, theta, BATCHES, sgd), wanted, rtol=1e-12, atol=1e-12)
    mapped = torch.vmap(lambda t: follow(in_parts, t, BATCHES, sgd))(theta[None])
    torch.testing.assert_close(mapped[0], wanted, rtol=1e-12, atol=1e-12)
