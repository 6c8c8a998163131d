"""The Triton kernels against plain torch in float64: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pefll.backend import blocks, client_axis, precision
from pefll.backend.geometry import Geometry
from pefll.backend.optim import sgd_step
from pefll.core import randomness
from pefll.core.errors import PefllError
from pefll.data.client import Batch
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from pefll.methods.contract import mean_loss
from pefll.methods.optim import SGD
from pefll.models import Network
from pefll.models.resnet import Block
from pefll.tasks import Classification
from pefll.training.evaluation import evaluate
from tests.federations import flat, problem_of, ragged

pytest.importorskip("triton", reason="Triton is not installed")
# Rows of padding overflow and divide by zero in the interpreter; what they give is never stored.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXAMPLES = settings(
    max_examples=40 if DEVICE == "cuda" else 6,  # Triton's interpreter takes seconds for each
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(client_axis, "interpreted", DEVICE == "cpu")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(got, wanted, within=1e-5):
    """Compare float32 numbers with float64 ones, as far as sums of float32 numbers go."""
    size = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=within * max(size, 1.0))


def both(function, *arguments):
    """Return a function's value in float32, where the kernels compute it, and in float64, where they do not."""
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
    narrow = function(*arguments)
    return narrow, function(*wide)


@st.composite
def convolutions(draw):
    pool, stride = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]))
    kh, kw = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    padding = draw(st.integers(0, 2))
    least = (pool - 1) * stride + max(kh, kw)
    return {
        "clients": draw(st.integers(1, 2)),
        "samples": draw(st.integers(1, 3)),
        "ci": draw(st.sampled_from([1, 3, 4, 7, 16, 17])),
        "co": draw(st.sampled_from([1, 5, 16, 33])),
        "kernel": (kh, kw),
        "h": max(1, least - 2 * padding) + draw(st.integers(0, 5)),
        "w": max(1, least - 2 * padding) + draw(st.integers(0, 5)),
        "stride": stride,
        "padding": padding,
        "pool": pool,
        "relu": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "channels_last": draw(st.booleans()),
        "shared": draw(st.booleans()),
        "feeds_convolution": draw(st.booleans()),
    }


@pytest.fixture(params=["float32", "bf16"])
def products(request):
    before = precision.use(request.param)
    yield request.param
    precision.use(before)


@EXAMPLES
@given(convolutions())
def test_convolution(products, case):
    check_convolution(products, case)


def test_rows_are_ordered_by_block_if_many_cells_are_beyond_the_border():
    from pefll.backend.kernels.conv_input_grad import block_cells

    # LeNet's second: 7 x 7 blocks of 2 x 2 pixels, which 5 x 5 cells have windows of 3 x 3 in.
    assert block_cells(Geometry(16, 14, 14, 32, 5, 5, 1, 0, 2, True)) == (2, -2, -2, 3, 3, True)
    # ResNet's: of 32 x 32 pixels all but those at the border look at 3 x 3 outputs.
    assert block_cells(Geometry(16, 32, 32, 16, 3, 3, 1, 1, 1, True)) == (1, -1, -1, 3, 3, False)


# Those of models that people train: several tiles and shares of a sum, and windows that are fetched 16 bytes at a time.
@pytest.mark.parametrize(
    ("ci", "co", "kernel", "size", "samples", "stride", "padding", "pool"),
    [
        pytest.param(3, 16, 5, 32, 3, 1, 0, 2, marks=pytest.mark.slow),
        pytest.param(16, 32, 5, 14, 4, 1, 0, 2, marks=pytest.mark.slow),
        pytest.param(16, 33, 3, 16, 4, 1, 1, 1, marks=pytest.mark.slow),
        (16, 32, 3, 16, 3, 2, 1, 1),
        (7, 20, 5, 13, 3, 1, 2, 2),
    ],
)
def test_convolutions_of_known_networks(products, ci, co, kernel, size, samples, stride, padding, pool):
    case = {"clients": 2, "samples": samples, "ci": ci, "co": co, "kernel": (kernel, kernel), "h": size, "w": size}
    rest = {"stride": stride, "padding": padding, "pool": pool, "relu": True, "bias": True}
    check_convolution(products, case | rest | {"channels_last": True, "shared": False, "feeds_convolution": pool == 1})


def check_convolution(products, case):
    c, b, ci, co = (case[name] for name in ("clients", "samples", "ci", "co"))
    x = random(c, b, ci, case["h"], case["w"])
    if case["channels_last"]:
        x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    w = random(*([] if case["shared"] else [c]), co, ci, *case["kernel"], seed=1)
    bias = random(*([] if case["shared"] else [c]), co, seed=2) if case["bias"] else None
    place = None if case["shared"] else 0
    # The interpreter has no bfloat16: there, the same kernels multiply float32 numbers. On a GPU they get numbers that
    # bfloat16 has, so that products are exact and the same positions win and pass.
    rounded = products == "bf16" and DEVICE == "cuda"

    def exact(part):
        return part.bfloat16().to(part.dtype) if rounded and part is not None else part

    def run(x, w, bias):
        def one(x, w, bias):
            numbers = (case["stride"], case["padding"], 1, 1, case["relu"], case["pool"])
            assert client_axis.convolves(x, w, *numbers[:4], case["pool"]) == (x.dtype == torch.float32)
            y = blocks.conv_block(x, w, bias, *numbers, feeds_convolution=case["feeds_convolution"])
            # Some function of the output whose gradient differs from place to place.
            return (y * exact(torch.arange(y.numel(), device=y.device).reshape(y.shape).sin()).to(y.dtype)).sum(), y

        inputs = (0, 1) if bias is None else (0, 1, 2)
        dims = (0, place, None if bias is None else place)
        return torch.vmap(torch.func.grad(one, argnums=inputs, has_aux=True), in_dims=dims)(x, w, bias)

    (gradients, y), (wanted_gradients, wanted) = both(run, *(exact(part) for part in (x, w, bias)))
    close(y, wanted)
    for got, expected in zip(gradients, wanted_gradients, strict=True):
        close(got, expected)


@pytest.mark.parametrize("layout", ["channels first", "channels last", "one for all", "part of more", "client last"])
def test_convolution_whose_output_has_gradients_in_any_layout(products, layout):
    x, w = random(2, 3, 4, 9, 9), random(2, 5, 4, 3, 3, seed=1)
    g = random(2, 3, 5, 3, 3, seed=2)
    if layout == "channels last":
        g = g.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    elif layout == "one for all":
        g = g[:1, :1].expand(2, 3, 5, 3, 3)
    elif layout == "part of more":
        g = random(2, 4, 7, 5, 5, seed=2)[:, 1:, 1:6, :3, 2:]
    elif layout == "client last":
        g = g.movedim(0, -1).contiguous().movedim(-1, 0)

    def run(x, w, g):
        def one(x, w, g):
            _, pull_back = torch.func.vjp(lambda x, w: blocks.conv_block(x, w, None, 1, 0, 1, 1, True, 2), x, w)
            return pull_back(g)

        return torch.vmap(one)(x, w, g)

    def exact(part):
        return part.bfloat16().to(part.dtype) if products == "bf16" and DEVICE == "cuda" else part

    narrow, wide = both(run, exact(x), exact(w), exact(g))
    for got, wanted in zip(narrow, wide, strict=True):
        close(got, wanted)


def test_only_the_end_of_a_chain_has_its_channels_first(products):
    x, first, second = random(2, 3, 1, 12, 12), random(2, 4, 1, 3, 3, seed=1), random(2, 5, 4, 3, 3, seed=2)
    layouts = []

    def chain(x, first, second):
        numbers = (None, 1, 0, 1, 1, True)
        y = blocks.conv_chain(x, ((first, *numbers, 2), (second, *numbers, 1)))
        layouts.append((blocks.conv_block(x, first, *numbers, 2).stride(), y.stride()))
        return y.flatten(1)

    got, wanted = both(torch.vmap(chain), x, first, second)
    close(got, wanted, 1e-5 if products == "float32" or DEVICE == "cpu" else 3e-2)
    assert layouts[0] == ((100, 1, 20, 4), (45, 9, 3, 1))


def test_between_blocks_with_shortcuts_channels_are_innermost(products, monkeypatch):
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), Block(4, 4, 1), Block(4, 8, 2), nn.Conv2d(8, 2, 3)
    network = Network(nn.Sequential(*layers, nn.Flatten()))
    theta, x = random(2, network.size), random(2, 3, 8, 8, 3, seed=1).permute(0, 1, 4, 2, 3)
    read, written, real = [], [], client_axis._convolve

    def convolve(x, *rest):
        result = real(x, *rest)
        read.append(x.stride(2))
        written.append(result[0].stride(2))
        return result

    monkeypatch.setattr(client_axis, "_convolve", convolve)
    got, wanted = both(torch.vmap(network), theta, x)
    close(got, wanted, 1e-5 if products == "float32" or DEVICE == "cpu" else 1e-1)
    assert read == [1] * 7  # of them one shortcut, which is a convolution
    assert written == [1] * 6 + [4]  # the last one feeds `flatten`, and is 2 x 2


def test_what_a_convolution_gives_can_be_viewed(products):
    class Rows(nn.Module):
        def forward(self, x):
            return x.view(x.shape[0], -1)

    network = Network(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), Rows()))
    got, wanted = both(torch.vmap(network), random(2, network.size), random(2, 3, 3, 8, 8, seed=1))
    close(got, wanted, 1e-5 if products == "float32" or DEVICE == "cpu" else 1e-1)


def test_an_empty_batch_is_computed_by_torch():
    x, w = random(0, 1, 8, 8), random(4, 1, 3, 3)
    assert not client_axis.convolves(x, w, 1, 0, 1, 1, 1)


@EXAMPLES
@given(st.integers(1, 3), st.integers(1, 40), st.sampled_from([1, 7, 33, 130]), st.sampled_from([1, 10, 40, 70]),
       st.booleans(), st.booleans())  # fmt: skip
def test_linear(clients, samples, inputs, outputs, relu, bias):
    x, w = random(clients, samples, inputs), random(clients, outputs, inputs, seed=1)
    b = random(clients, outputs, seed=2) if bias else None

    def run(x, w, b):
        def one(x, w, b):
            assert client_axis.multiplies(x, w) == (x.dtype == torch.float32)
            y = blocks.linear_block(x, w, b, relu)
            return (y * torch.arange(y.numel(), device=y.device).reshape(y.shape).sin()).sum(), y

        argnums = (0, 1, 2) if bias else (0, 1)
        return torch.vmap(torch.func.grad(one, argnums=argnums, has_aux=True), in_dims=(0, 0, 0 if bias else None))(
            x, w, b
        )

    (gradients, y), (wanted_gradients, wanted) = both(run, x, w, b)
    close(y, wanted)
    for got, expected in zip(gradients, wanted_gradients, strict=True):
        close(got, expected)


@EXAMPLES
@given(st.integers(1, 3), st.integers(1, 40), st.integers(2, 40))
def test_cross_entropy(clients, samples, classes):
    scores = 5 * random(clients, samples, classes)
    y = torch.arange(clients * samples, device=DEVICE).reshape(clients, samples) % classes
    weight = (torch.arange(samples, device=DEVICE) <= samples // 2).float().expand(clients, samples)

    def run(scores, y, weight):
        def loss(scores, y, weight):
            return mean_loss(Classification(classes), scores, Batch(None, y, weight))

        return torch.vmap(torch.func.grad_and_value(loss))(scores, y, weight)

    (gradient, loss), (wanted_gradient, wanted) = both(run, scores, y, weight)
    close(loss, wanted)
    close(gradient, wanted_gradient)


class Made(TorchDispatchMode):
    """Notes which of torch's own operations write new memory, each of them a kernel of its own on a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), more=None):
        result = function(*arguments, **(more or {}))
        given, made = (
            {part.untyped_storage().data_ptr() for part in tree_leaves(tree) if isinstance(part, torch.Tensor)}
            for tree in ((arguments, more), result)
        )
        if function.namespace == "aten" and not made <= given and "empty" not in function.__name__:
            self.names.append(function.__name__)
        return result


def test_pixels_are_the_same_without_kernels():
    federation = ragged(shape=(3, 9, 8), pixels=True).to(DEVICE)
    rows = torch.arange(12, device=DEVICE).reshape(2, 6) * 3 % len(federation.x)
    for wanted in (rows, rows.T.contiguous().T):  # however the numbers lie in memory
        narrow = torch.vmap(lambda rows: federation.take(rows, torch.float32))(wanted)
        close(narrow, torch.vmap(lambda rows: federation.take(rows, torch.float64))(wanted))


@EXAMPLES
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 33), st.integers(1, 33)),
    st.integers(1, 4),
    st.integers(1, 33),
    st.data(),
)
def test_pixels_of_any_shape(shape, clients, samples, data):
    federation = ragged(shape=shape, pixels=True).to(DEVICE)
    place = st.integers(0, len(federation.x) - 1)
    chosen = data.draw(st.lists(place, min_size=clients * samples, max_size=clients * samples))
    rows = torch.tensor(chosen, device=DEVICE).reshape(clients, samples)
    narrow = torch.vmap(lambda rows: federation.take(rows, torch.float32))(rows)
    close(narrow, torch.vmap(lambda rows: federation.take(rows, torch.float64))(rows))


def test_pixels_in_another_layout_are_gathered_by_the_reference():
    federation = ragged(shape=(3, 9, 8), pixels=True)
    turned = replace(federation, x=federation.x.to(memory_format=torch.channels_last)).to(DEVICE)
    rows = torch.arange(6, device=DEVICE)
    assert torch.equal(turned.take(rows, torch.float64), federation.to(DEVICE).take(rows, torch.float64))
    close(turned.take(rows, torch.float32), turned.take(rows, torch.float64))


def test_keys(monkeypatch):
    round_, clients = torch.full((), 7, device=DEVICE), torch.arange(5, device=DEVICE) ** 9 - 1000

    def keys(client):
        one = randomness.key(3, "adapt", round_, client)
        return one, randomness.spread(one, 300), randomness.key(3, "cohort", round_)

    def all_of_them():
        return *torch.vmap(keys)(clients), randomness.spread(clients.reshape(5, 1), 4)

    kernels = all_of_them()
    monkeypatch.setattr(client_axis, "available", lambda *_: False)
    for got, wanted in zip(kernels, all_of_them(), strict=True):
        assert torch.equal(got, wanted)


@EXAMPLES
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=5), st.integers(1, 70), st.integers(0, 2**31))
def test_any_random_choices_are_the_same_bits(totals, count, number):
    state = randomness.key(3, "test", torch.full((), number, device=DEVICE))
    draws, total = randomness.spread(state, len(totals)), torch.tensor(totals, device=DEVICE)

    def choose(one, total):
        return randomness.choose(randomness.spread(one, 2), total, count)

    kernels = torch.vmap(choose)(draws, total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_axis, "available", lambda *_: False)
        assert torch.equal(kernels, torch.vmap(choose)(draws, total))
    assert ((kernels >= 0) & (kernels < total.reshape(-1, *[1] * (kernels.dim() - 1)))).all()


@pytest.mark.parametrize("count", [1, 9, 300])
def test_random_choices_are_the_same_bits(count, monkeypatch):
    draws = torch.stack([randomness.key(3, "test", torch.full((), number, device=DEVICE)) for number in range(5)])
    total = torch.tensor([1, 7, 33, 400, 10**12], device=DEVICE)

    def choose(state, total):
        return randomness.choose(randomness.spread(state, 2), total, count)

    kernels = torch.vmap(choose)(draws, total), randomness.choose(draws, 400, count)
    monkeypatch.setattr(client_axis, "available", lambda *_: False)
    plain = torch.vmap(choose)(draws, total), randomness.choose(draws, 400, count)
    assert all(torch.equal(a, b) for a, b in zip(kernels, plain, strict=True))


def small_net(theta, x):
    """A network with one of each block; theta [185]."""
    parts = torch.split(theta, [36, 4, 140, 5])
    x = blocks.conv_block(x, parts[0].view(4, 1, 3, 3), parts[1], 1, 0, 1, 1, True, 2)
    return blocks.linear_block(x.flatten(1)[:, :28], parts[2].view(5, 28), parts[3], False)


def test_clients_may_be_mapped_over_in_several_axes():
    theta, x = random(2, 3, 185), random(2, 3, 4, 1, 8, 8, seed=1)

    def loss(theta, x):
        return small_net(theta, x).square().sum()

    run = torch.vmap(torch.vmap(torch.func.grad(loss)))
    narrow, wide = both(run, theta, x)
    close(narrow, wide)
    alone = torch.stack([torch.func.grad(loss)(theta[1, i], x[1, i]) for i in range(3)])
    assert torch.equal(alone, narrow[1])  # a client's result does not depend on who is mapped with it


def test_ordinary_autograd_takes_the_kernels_too():
    theta, x = random(185).requires_grad_(), random(4, 1, 8, 8, seed=1)
    (gradient,) = torch.autograd.grad(small_net(theta, x).square().sum(), theta)
    wide = theta.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(small_net(wide, x.double()).square().sum(), wide)
    close(gradient, wanted)


def test_only_the_gradient_may_be_mapped():
    """As in a Jacobian: everything that the forward pass left behind is then shared."""
    theta, x = random(185), random(2, 1, 8, 8, seed=1)
    narrow, wide = both(torch.func.jacrev(small_net), theta, x)
    close(narrow, wide)


def second_derivative(loss):
    return torch.func.grad(lambda theta: torch.func.grad(loss)(theta).square().sum())


def test_second_derivatives_are_refused():
    x, y, ones = random(2, 1, 8, 8, seed=1), torch.zeros(2, dtype=torch.int64, device=DEVICE), random(2).square()
    with pytest.raises(PefllError, match="PEFLL-E003"):
        second_derivative(lambda theta: small_net(theta, x).square().sum())(random(185))
    with pytest.raises(PefllError, match="PEFLL-E003"):
        second_derivative(lambda scores: client_axis.cross_entropy(scores, y, ones))(random(2, 3))
    with pytest.raises(PefllError, match="PEFLL-E003"):
        torch.func.grad(lambda scores: client_axis.cross_entropy_gradient(scores, y, ones).sum())(random(2, 3))
    with pytest.raises(PefllError, match="PEFLL-E003"):
        torch.func.grad(lambda theta: sgd_step(theta, theta, theta, SGD(0.1))[0].sum())(random(7))


def test_nan_is_not_hidden():
    weight = random(4, 1, 3, 3)
    weight[2] = torch.nan
    y = blocks.conv_block(random(2, 1, 8, 8), weight, None, 1, 0, 1, 1, True, 2)
    assert torch.isnan(y[:, 2]).all()
    assert torch.isfinite(y[:, [0, 1, 3]]).all()
    w = random(3, 5)
    w[1, 2] = torch.nan
    assert torch.isnan(blocks.linear_block(random(2, 5), w, None, True)[:, 1]).all()


@pytest.mark.parametrize(
    "change",
    [
        {"stride": (1, 2)},
        {"stride": 3},
        {"padding": (0, 1)},
        {"dilation": 2},
        {"groups": 2},
        {"pool": 3},
        {"pool": 4},
        {"stride": 4, "pool": 2},
    ],
)
def test_other_convolutions_are_computed_by_torch(change):
    numbers = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "pool": 1} | change
    x, w = random(2, 4, 12, 12), random(6, 4 // numbers["groups"], 3, 3, seed=1)
    assert not client_axis.convolves(x, w, *numbers.values())
    pool = numbers.pop("pool")
    y = blocks.conv_block(x, w, None, **numbers, relu=True, pool=pool)
    wanted = F.relu(F.max_pool2d(F.conv2d(x.double(), w.double(), None, **numbers), pool))
    close(y, wanted)


def test_large_layers_are_computed_by_torch():
    assert not client_axis.multiplies(random(200, 3), random(4, 3))
    assert not client_axis.multiplies(random(2, 3), random(2000, 3))
    assert not client_axis.multiplies(random(2, 2, 3), random(4, 3))


def test_tf32_and_bf16_products():
    x, w = random(1, 40, 33), random(1, 10, 33, seed=1)
    wanted = x.double() @ w.double().transpose(1, 2)
    errors = {}
    for name in ("float32", "tf32", "bf16") if DEVICE == "cuda" else ("float32", "tf32"):  # NumPy has no bfloat16
        before = precision.use(name)
        try:
            y = torch.vmap(lambda x, w: blocks.linear_block(x, w, None, False))(x, w)
        finally:
            precision.use(before)
        errors[name] = float((y - wanted).abs().max() / wanted.abs().max())
    assert errors["float32"] < 1e-6
    assert errors["tf32"] < 3e-3
    if DEVICE == "cuda":
        assert 1e-5 < errors["tf32"] < errors["bf16"] < 3e-2


def test_tiles_shrink_until_they_fit(monkeypatch):
    tiles = pytest.importorskip("pefll.backend.kernels.tiles")
    assert tiles.shrunk(random(1), 128, 128, 64, 3, "tf32") == (128, 128, 3)
    monkeypatch.setattr(tiles, "shared_memory", lambda _: 101_376)
    assert tiles.shrunk(random(1), 128, 128, 64, 3, "tf32") == (128, 128, 2)
    for precision_, limit in (("tf32", 101_376), ("tf32x3", 101_376), ("tf32", 49_152), ("tf32x3", 20_000)):
        monkeypatch.setattr(tiles, "shared_memory", lambda _, limit=limit: limit)
        rows, inner, stages = tiles.shrunk(random(1), 128, 128, 64, 4, precision_)
        assert 4 * inner * (rows + 64) * (stages - 1) * (4 if precision_ == "tf32x3" else 3) // 3 <= limit
        assert min(rows, inner) >= tiles.SMALLEST
    monkeypatch.setattr(tiles, "shared_memory", lambda _: 0)
    assert tiles.shrunk(random(1), 128, 128, 64, 4, "tf32")[:2] == (16, 16)


def test_kernels_can_be_switched_off(monkeypatch):
    client_axis._runs_kernels.cache_clear()
    monkeypatch.setenv("PEFLL_KERNELS", "0")
    assert not client_axis._runs_kernels(torch.device("cuda"))
    client_axis._runs_kernels.cache_clear()


SETTINGS = {
    "pefll": {"local_steps": 2, "batch_size": 3, "descriptor_batch": 3, "server_optimizer": "sgd"},
    "pefll-prior": {"local_steps": 1, "batch_size": 3, "descriptor_batch": 3, "server_optimizer": "sgd"},
    "pefll-plus": {"local_steps": 1, "batch_size": 3, "server_optimizer": "sgd", "refine_steps": 2},
    "pfedhn": {"local_steps": 1, "batch_size": 3, "hypernetwork": "S", "new_rounds": 2},
    "knn-per": {"local_steps": 1, "batch_size": 3, "few_neighbours": 1, "many_neighbours": 3},
    "pfedme": {"local_rounds": 1, "inner_steps": 2, "batch_size": 3, "new_epochs": 1},
    "fedrep": {"head_epochs": 1, "new_epochs": 2, "batch_size": 3},
    "per-fedavg": {"batch_size": 3, "personal_steps": 1},
}


# What FedAvg and Local do is in the others. The interpreter takes its time, so that it does those that differ most.
@pytest.mark.parametrize(
    "name", SETTINGS if DEVICE == "cuda" else ("pefll", "fedrep", pytest.param("pfedhn", marks=pytest.mark.slow))
)
def test_a_round_with_kernels_is_the_serial_engines(name):
    federation = ragged(shape=(1, 8, 8), pixels=True, sizes=(1, 4), clients=4, seen=3)
    method = build_method(name, problem_of(federation, "cnn"), SETTINGS[name])
    states, scores = [], []
    for make, dtype, place in ((SerialEngine, torch.float64, {}), (VectorEngine, torch.float32, {"device": DEVICE})):
        engine = make(federation, method, seed=1, clients_per_round=2, dtype=dtype, **place)
        server = engine.advance(engine.start(), 0, 1)
        states.append(flat(server).cpu().double())
        scores.append(evaluate(engine, method, server, 2))
        engine.close()
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-5)
    assert scores[0].seen.loss == pytest.approx(scores[1].seen.loss, abs=1e-4)
    assert scores[0].unseen.loss == pytest.approx(scores[1].unseen.loss, abs=1e-4)
