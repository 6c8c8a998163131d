"""Kernels that do the clients of several runs add up each run's numbers as they do for that run alone."""

from __future__ import annotations

import pytest
import torch

from pefll.methods.local_sgd import SGD, follow
from pefll.models import Network
from pefll.models.convnet import lenet
from pefll.ops import blocks, client_axis, precision, together
from tests.ops.test_kernels import DEVICE, interpreter, random  # noqa: F401 (a fixture)

pytest.importorskip("triton", reason="Triton is not installed")


def test_tiles_are_chosen_for_the_clients_of_one_run():
    from pefll.ops.kernels import convolution, linear

    def choices(clients):
        x = torch.empty(clients, 32, 800, device="meta")
        pixels = torch.empty(clients, 32, 16, 14, 14, device="meta")
        s = client_axis._geometry(14, 14, torch.empty(1, 32, 16, 5, 5, device="meta"), 1, 0, 2, True)
        return (
            linear._forward_tile(x, 600, "tf32"),
            linear._backward_tile(x, 120)[0],
            convolution._forward_tile(s, pixels, "tf32"),
        )

    assert all(one != three for one, three in zip(choices(5), choices(150), strict=True))
    with together.clients_of(30):
        joined = choices(150)
    assert joined == choices(5)


@pytest.mark.parametrize("products", ["tf32", "bf16"])
def test_sums_are_those_of_one_run_alone(products, monkeypatch):
    from pefll.ops.kernels import convolution, laid

    monkeypatch.setattr(convolution, "PROGRAMS", 2)  # so that more clients mean fewer parts of a sum
    monkeypatch.setattr(laid, "PROGRAMS", 3)  # and two clients' rows larger parts of the bias's than one's
    # Two runs of one client each; of more channels than first layers have, whose kernels are others.
    x, w, bias = random(2, 8, 5, 8, 8), random(2, 4, 5, 3, 3), random(2, 4)

    def gradients(*arguments):
        def loss(w, bias, x):
            return blocks.conv_block(x, w, bias, 1, 0, 1, 1, True, 1).square().sum()

        return torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(*arguments)

    before = precision.use(products)
    try:
        alone = [gradients(*(part[i : i + 1].clone() for part in (w, bias, x))) for i in range(2)]
        unlike = gradients(w, bias, x)
        with together.clients_of(2):
            joined = gradients(w, bias, x)
    finally:
        precision.use(before)
    for place in range(2):
        assert torch.equal(joined[place], torch.cat([one[place] for one in alone]))
    assert not torch.equal(unlike[0], joined[0])


# Tiles that change no sum are chosen for all clients, so that 3 x 20 have others than 20; on a GPU bits can tell.
@pytest.mark.skipif(DEVICE == "cpu", reason="so many clients take too long in the interpreter")
@pytest.mark.parametrize(("clients", "classes"), [(5, 10), (20, 10), (20, 62)])
@pytest.mark.parametrize("products", ["float32", "tf32", "bf16"])
def test_gradients_of_a_whole_network_are_those_of_one_run_alone(products, clients, classes):
    model = Network(lenet((3, 32, 32), classes))
    theta, x = 0.05 * random(3 * clients, model.size), random(3 * clients, 32, 3, 32, 32)
    y = torch.arange(32, device=DEVICE) % classes

    def gradients(theta, x):
        def loss(parameters, x):
            return blocks.cross_entropy(model(parameters, x), y, torch.ones(32, device=DEVICE))

        return torch.vmap(lambda at, x: torch.func.grad(loss)(model.in_parts(at), x))(theta, x)

    before = precision.use(products)
    try:
        with together.clients_of(3):
            joined = gradients(theta, x)
        for run in range(3):
            its = slice(run * clients, (run + 1) * clients)
            alone = gradients(theta[its].clone(), x[its].clone())
            assert all(torch.equal(alone[name], joined[name][its]) for name in model.names)
    finally:
        precision.use(before)


def test_steps_of_sgd_are_those_of_one_run_alone(monkeypatch):
    from pefll.ops.kernels import vectors

    monkeypatch.setattr(vectors, "_MOST_SHARES", 2)
    theta, bend = random(3, 5000), random(3, 5000, seed=1)  # three runs of one client each
    first, second = slice(0, 1300), slice(1300, 5000)

    def train(theta, bend):
        def along(at, batch):
            return tuple((bend[part] * at[part] + batch).view(-1, 100) for part in (first, second))

        return follow(along, theta, [0.5, 1.5, 2.5], SGD(0.1, 0.9, 0.01, 2.0))

    with together.clients_of(3):
        joined = torch.vmap(train)(theta, bend)
    for i in range(3):
        assert torch.equal(torch.vmap(train)(theta[i : i + 1].clone(), bend[i : i + 1].clone())[0], joined[i])
