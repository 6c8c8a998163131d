"""Convolutions one after another in bfloat16: on a GPU where there is one, else interpreted and emulated.

What one writes for the next is rounded once, by the one or by the other, so that it makes no difference by which.
"""

from __future__ import annotations

import shutil
from itertools import pairwise

import pytest
import torch

from pefll.backend import blocks, client_axis, precision
from pefll.backend.geometry import Geometry
from pefll.data.client import Batch
from pefll.methods import Problem
from pefll.methods.optim import SGD, sgd_on_loss
from pefll.models import Network
from pefll.models.convnet import ConvNet

pytest.importorskip("triton", reason="Triton is not installed")
from pefll.backend.kernels import compiled, conv_backward_bf16, convolution, pictures
from tests.backend import bfloat16
from tests.backend.test_kernels import DEVICE, Made, random
from tests.backend.test_pictures import emulated

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # see test_kernels.py
    pytest.mark.skipif(DEVICE == "cpu" and shutil.which("g++") is None, reason="neither a GPU nor g++ is here"),
]
TRITON, CUDA = "triton", "cuda"


@pytest.fixture(autouse=True)
def halves(monkeypatch):
    before = precision.use("bf16")
    if DEVICE == "cpu":
        monkeypatch.setattr(client_axis, "interpreted", True)
        bfloat16.teach(monkeypatch)
    yield
    precision.use(before)


@pytest.fixture
def first_layers(monkeypatch, tmp_path_factory):
    """Return what lets one or the other kind of kernels take first layers."""
    folder = tmp_path_factory.getbasetemp() / "emulated"
    folder.mkdir(exist_ok=True)

    def by(kernels):
        if DEVICE == "cpu":
            monkeypatch.setattr(compiled, "kernel", lambda *which: emulated(folder, *which[:3]))
        if kernels == TRITON:
            monkeypatch.setattr(pictures, "takes", lambda *_: False)
        elif DEVICE == "cpu":
            monkeypatch.setattr(
                pictures, "takes", lambda s, precision, _: precision != "tf32x3" and pictures.fits(s, precision)
            )

    return by


@pytest.fixture
def types(monkeypatch):
    """Notes of what type is what convolutions read and write, and what they get and give back."""
    noted, (forward, backward) = [], (client_axis._convolve, client_axis._convolve_backward)

    def convolve(x, *rest):
        result = forward(x, *rest)
        noted.append((x.dtype, result[0].dtype))
        return result

    def convolve_backward(g, *rest):
        result = backward(g, *rest)
        noted.append((g.dtype, result[0].dtype if rest[5] else None))  # whether it is wanted
        return result

    monkeypatch.setattr(client_axis, "_convolve", convolve)
    monkeypatch.setattr(client_axis, "_convolve_backward", convolve_backward)
    return noted


# Input channels, side of a picture, and of convolutions: filters, their side, stride, padding, pool, ReLU, bias.
CHAINS = {
    "LeNet": (3, 16, [(16, 5, 1, 0, 2, True, True), (32, 5, 1, 0, 2, True, True)]),
    "three": (3, 8, [(8, 3, 1, 1, 1, True, False), (12, 3, 2, 1, 1, True, True), (7, 3, 1, 1, 1, True, True)]),
    "all pass": (1, 7, [(8, 3, 1, 1, 1, False, True), (8, 3, 1, 1, 1, False, True), (5, 1, 1, 0, 1, False, False)]),
    "many channels": (5, 7, [(16, 3, 1, 1, 2, True, True), (20, 3, 1, 1, 1, True, True)]),
    "few channels": (3, 8, [(4, 3, 1, 0, 1, True, True), (6, 3, 1, 0, 1, True, True), (8, 3, 1, 0, 1, True, True)]),
}


def rounds(name, kernels, wants_input):
    """Return, of what lies between a chain's convolutions, whether it can be bfloat16."""
    channels, _, layers = CHAINS[name]
    read = [channels, *(filters for filters, *_ in layers)]
    by_cuda = [kernels == CUDA and channels <= pictures.MOST_CHANNELS for channels in read[:-1]]
    whole = [channels % 4 == 0 and not cuda for channels, cuda in zip(read, by_cuda, strict=False)]
    return [whole[1] and not (wants_input and by_cuda[0]), *whole[2:]]


def parameters_of(channels, layers, clients):
    """Return w0 [c, co, ci, kh, kw], b0 [c, co], w1 and so on; no biases where there are none."""
    parameters = {}
    for place, (filters, side, *_, biased) in enumerate(layers):
        parameters[f"w{place}"] = random(clients, filters, channels, side, side, seed=place) / side / channels**0.5
        if biased:
            parameters[f"b{place}"] = random(clients, filters, seed=place + 10)
        channels = filters
    return parameters


def run(name, together, wants_input):
    """Return outputs and all gradients of a chain, with bfloat16 between convolutions where it can be, or without."""
    channels, side, layers = CHAINS[name]
    x = random(2, 3, side, side, channels, seed=20).permute(0, 1, 4, 2, 3)

    def chain(x, parameters):
        parts = tuple(
            (parameters[f"w{place}"], parameters.get(f"b{place}"), stride, padding, 1, 1, relu, pool)
            for place, (_, _, stride, padding, pool, relu, _) in enumerate(layers)
        )
        if together:
            return blocks.conv_chain(x, parts)
        for place, part in enumerate(parts, start=1):
            x = blocks.conv_block(x, *part, feeds_convolution=place < len(parts))
        return x

    def one(x, parameters):
        given = {"x": x} if wants_input else {}
        y, pull_back = torch.func.vjp(lambda at: chain(at.get("x", x), at), given | parameters)
        (gradients,) = pull_back(torch.arange(y.numel(), device=DEVICE).reshape(y.shape).sin())
        return gradients | {"y": y}

    return torch.vmap(one)(x, parameters_of(channels, layers, 2))


# Triton's interpreter takes seconds for each: these differ most, and `make test-all` and `make test-gpu` take all.
FIRST = [("three", CUDA, False), ("all pass", CUDA, True), ("many channels", TRITON, False)]
FIRST += [("few channels", TRITON, False)]
CASES = [
    pytest.param(name, kernels, wants, marks=() if (name, kernels, wants) in FIRST else pytest.mark.slow)
    for name in CHAINS
    for kernels in (TRITON, CUDA)
    for wants in (False, True)
]


@pytest.mark.parametrize(("name", "kernels", "wants_input"), CASES)
def test_bf16_between_convolutions_changes_no_result(name, kernels, wants_input, first_layers, types):
    first_layers(kernels)
    apart = run(name, False, wants_input)
    assert {torch.float32, None} >= {kind for pair in types for kind in pair}
    types.clear()
    together = run(name, True, wants_input)
    between = rounds(name, kernels, wants_input)
    kinds = [torch.float32, *(torch.bfloat16 if rounded else torch.float32 for rounded in between), torch.float32]
    forward = list(pairwise(kinds))
    backward = list(pairwise([*kinds[:0:-1], torch.float32 if wants_input else None]))
    assert types == forward + backward
    assert apart.keys() == together.keys()
    # In Triton the gradient of a bias is a sum of gradients as they come, and these come rounded now; in CUDA C++ it
    # always was of rounded ones.
    of_cuda = kernels == CUDA and CHAINS[name][0] <= pictures.MOST_CHANNELS
    summed = {f"b{place}" for place, rounded in enumerate(between) if rounded and (place > 0 or not of_cuda)}
    for key, wanted in apart.items():
        if key in summed:
            torch.testing.assert_close(together[key], wanted, rtol=0, atol=2**-6 * float(wanted.abs().max()))
        else:
            assert torch.equal(together[key], wanted), key


@pytest.mark.parametrize("products", ["float32", "tf32"])
def test_other_precisions_write_float32(products, types):
    precision.use(products)
    run("many channels", True, wants_input=True)
    assert set(types) == {(torch.float32, torch.float32)}


def test_a_convolution_that_torch_computes_gets_float32(types):
    x, first, second = random(2, 3, 4, 8, 8), random(2, 8, 4, 3, 3), random(2, 8, 4, 3, 3, seed=1)

    def chain(x, first, second):
        numbers = (1, 0, 1)
        return blocks.conv_chain(x, ((first, None, *numbers, 1, True, 1), (second, None, *numbers, 2, True, 1)))

    assert torch.vmap(chain)(x, first, second).dtype == torch.float32  # of two groups, which are for torch
    assert types == [(torch.float32, torch.float32)]


def test_the_bias_gradient_is_a_float32_sum_of_rounded_gradients():
    s = Geometry(4, 9, 9, 8, 3, 3, 1, 1, 2, True)
    x, w, g = random(2, 3, 4, 9, 9), random(2, 8, 4, 3, 3, seed=1), random(2, 3, 8, 4, 4, seed=2).bfloat16()
    made = convolution.forward(x, w, None, s, "bf16")
    narrow, wide = (conv_backward_bf16.routed_gradient(part, made.route, made.nhwc, s) for part in (g, g.float()))
    assert torch.equal(narrow[0], wide[0])
    # On a GPU threads hold more numbers of the smaller type, and add them in another order.
    torch.testing.assert_close(narrow[1], wide[1], rtol=0, atol=0 if DEVICE == "cpu" else 1e-5)


def calls_of(module, name, monkeypatch):
    """Return a list that will have arguments and result of each call."""
    calls, real = [], getattr(module, name)

    def noting(*given):
        calls.append((given, real(*given)))
        return calls[-1][1]

    monkeypatch.setattr(module, name, noting)
    return calls


@pytest.mark.parametrize("kernels", [pytest.param(TRITON, marks=pytest.mark.slow), CUDA])
def test_bf16_outputs_and_gradients_are_not_copied(kernels, first_layers, monkeypatch):
    first_layers(kernels)
    written = calls_of(pictures if kernels == CUDA else convolution, "forward", monkeypatch)
    read = calls_of(conv_backward_bf16, "weight_gradient", monkeypatch)
    given_back = calls_of(conv_backward_bf16, "input_gradient", monkeypatch)
    got = calls_of(
        *((pictures, "weight_gradient") if kernels == CUDA else (conv_backward_bf16, "routed_gradient")), monkeypatch
    )
    run("LeNet", True, wants_input=False)
    y, x, dx, g = written[0][1][0], read[0][0][2], given_back[0][1], got[-1][0][0]
    assert y.dtype == dx.dtype == torch.bfloat16
    assert x.data_ptr() == y.data_ptr()
    assert g.data_ptr() == dx.data_ptr()


@pytest.mark.parametrize("kernels", [TRITON, CUDA])
def test_a_local_step_launches_nothing_but_our_kernels(kernels, first_layers, types):
    first_layers(kernels)
    problem = Problem(Network(ConvNet((1, 10, 10), 3, 3, (6,))), (1, 10, 10), 3, 4)
    theta, x = 0.3 * random(2, problem.model.size), random(2, 2, 1, 10, 10, seed=1)
    y, weight = torch.tensor([[0, 2], [1, 1]], device=DEVICE), torch.ones(2, 2, device=DEVICE)

    def train(theta, x, y, weight):
        return sgd_on_loss(problem.loss, theta, [Batch(x, y, weight)], SGD(0.1, 0.9, 0.01, 2.0))

    with Made() as made:
        torch.vmap(train)(theta, x, y, weight)
    assert made.names == []
    between = (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)
    assert types == [between[1], between[0], between[1], (torch.bfloat16, None)]
