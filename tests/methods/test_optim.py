"""Local SGD for one client alone, and mapped over clients: the same steps, and torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pefll.backend.alone import gradients
from pefll.data.client import Batch
from pefll.methods.contract import Problem
from pefll.methods.optim import SGD, clipped, sgd_along, sgd_on_loss
from pefll.models import Network

BATCHES = [torch.randn(5, generator=torch.Generator().manual_seed(seed)).double() for seed in range(6)]


class Unused(nn.Module):
    """Has a weight that nothing comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


def loss(theta: Tensor, batch: Tensor) -> Tensor:
    return (theta * batch).sum().cos() * 4 + theta.pow(4).sum()


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("grad", [True, False])
def test_alone_mapped_and_torchs_optimiser_agree(clip, grad):
    sgd = SGD(lr=0.05, momentum=0.9, decay=0.1, clip=clip)
    theta = torch.linspace(-1, 1, 5).double()
    given = theta.clone()
    with torch.set_grad_enabled(grad):
        alone = sgd_on_loss(loss, theta, BATCHES, sgd)
    assert torch.equal(theta, given)  # the caller's vector is not touched
    assert not alone.requires_grad
    mapped = torch.vmap(lambda t: sgd_on_loss(loss, t, BATCHES, sgd))(torch.stack([theta, theta + 1]))
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


@pytest.mark.parametrize("towards", [None, torch.linspace(0, 2, 5).double()])
def test_the_proximal_term_pulls_towards_a_point(towards):
    """With its gradient in the direction, and by hand; `None` is the initial parameters."""
    theta, sgd = torch.linspace(-1, 1, 5).double(), SGD(lr=0.05, decay=0.1, clip=0.5, proximal=0.8)
    anchor = theta if towards is None else towards
    velocity, wanted = torch.zeros_like(theta), theta
    for batch in BATCHES:
        step = clipped(torch.func.grad(loss)(wanted, batch), 0.5) + 0.1 * wanted + 0.8 * (wanted - anchor)
        velocity = 0.9 * velocity + step
        wanted = wanted - 0.05 * velocity
    assert (wanted - sgd_on_loss(loss, theta, BATCHES, sgd._replace(proximal=0.0))).abs().max() > 1e-3
    alone = sgd_on_loss(loss, theta, BATCHES, sgd, towards=towards)
    torch.testing.assert_close(alone, wanted, rtol=1e-12, atol=1e-12)
    mapped = torch.vmap(lambda t: sgd_on_loss(loss, t, BATCHES, sgd, towards=towards))(theta.expand(2, -1))
    torch.testing.assert_close(mapped[1], wanted, rtol=1e-12, atol=1e-12)


def test_a_rate_may_be_a_tensor():
    theta = torch.linspace(-1, 1, 5).double()
    wanted = sgd_on_loss(loss, theta, BATCHES, SGD(lr=0.05))
    scheduled = SGD(lr=torch.tensor(0.05).double())
    torch.testing.assert_close(sgd_on_loss(loss, theta, BATCHES, scheduled), wanted, rtol=1e-7, atol=0)
    mapped = torch.vmap(lambda t: sgd_on_loss(loss, t, BATCHES, scheduled))(theta[None])
    torch.testing.assert_close(mapped[0], wanted, rtol=1e-7, atol=1e-12)


def test_clients_stop_after_their_own_number_of_steps():
    sgd, theta = SGD(lr=0.05), torch.linspace(-1, 1, 5).double()
    steps = torch.tensor([0, 2, 6, 9])
    mapped = torch.vmap(lambda s: sgd_on_loss(loss, theta, BATCHES, sgd, steps=s))(steps)
    for own, result in zip(steps, mapped, strict=True):
        torch.testing.assert_close(sgd_on_loss(loss, theta, BATCHES, sgd, steps=own), result, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sgd_on_loss(loss, theta, BATCHES[: int(own)], sgd), result, rtol=1e-12, atol=1e-12)


def test_training_can_be_differentiated():
    """Somebody who differentiates through the steps gets the derivative, not the fast path."""
    sgd, theta = SGD(lr=0.05), torch.linspace(-1, 1, 5).double()
    wanted = torch.func.jacrev(lambda t: sgd_on_loss(loss, t, BATCHES[:3], sgd))(theta)
    leaf = theta.clone().requires_grad_()
    rows = [torch.autograd.grad(part, leaf, retain_graph=True)[0] for part in sgd_on_loss(loss, leaf, BATCHES[:3], sgd)]
    torch.testing.assert_close(torch.stack(rows), wanted, rtol=1e-10, atol=1e-10)


def test_a_gradient_that_is_one_number_everywhere():
    result = sgd_on_loss(lambda theta, batch: theta.sum(), torch.zeros(3), [0, 1], SGD(lr=1.0, momentum=0.0, clip=None))
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

    wanted = sgd_on_loss(loss, theta, BATCHES, sgd)
    torch.testing.assert_close(sgd_along(in_parts, theta, BATCHES, sgd), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_of_a_gradient_may_lie_in_memory_as_they_like(dtype):
    def in_parts(at: Tensor, batch: Tensor) -> tuple[Tensor, ...]:
        whole = (at * batch.to(dtype).mean()).cos()
        pictures = whole[:24].view(2, 2, 2, 3).contiguous(memory_format=torch.channels_last)
        return pictures, whole[24:30].view(3, 2).T.contiguous().T, whole[30:31].expand(4), whole[31:].repeat(2)[::8]

    def as_whole(at: Tensor, batch: Tensor) -> Tensor:
        return torch.cat([part.reshape(-1) for part in in_parts(at, batch)])

    theta, sgd = torch.linspace(-1, 1, 35).to(dtype), SGD(lr=0.05, decay=0.1, clip=2.0)
    velocity, wanted = torch.zeros_like(theta), theta
    for batch in BATCHES:
        velocity = 0.9 * velocity + clipped(as_whole(wanted, batch), 2.0) + 0.1 * wanted
        wanted = wanted - 0.05 * velocity
    torch.testing.assert_close(sgd_along(in_parts, theta, BATCHES, sgd), wanted)


def test_what_is_not_a_number_stays_none():
    for bad in (float("nan"), float("inf")):
        end = sgd_along(lambda at, batch, bad=bad: at * bad, torch.ones(3), BATCHES[:2], SGD(lr=0.1))
        assert not torch.isfinite(end).any()


def test_a_problems_gradient_in_parts_is_its_gradient():
    layers = nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3), Unused()
    problem = Problem(Network(nn.Sequential(*layers)), (2, 8, 8), 3, 1)
    theta = problem.model.init(0, "model")
    batch = Batch(torch.randn(5, 2, 8, 8), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([1.0, 1, 1, 1, 0]))
    parts = gradients(problem.loss, problem.model.in_parts(theta), batch)
    assert [part.shape for part in parts] == [tuple(shape) for shape in problem.model.shapes]
    whole = torch.func.grad(problem.loss)(theta, batch)
    torch.testing.assert_close(torch.cat([part.reshape(-1) for part in parts]), whole, rtol=1e-4, atol=1e-6)
    assert torch.count_nonzero(parts[-1]) == 0
