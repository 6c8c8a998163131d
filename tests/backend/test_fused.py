"""Fused networks compute what the networks they were made from do, with the same names; and what must stay, stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pefll.backend.blocks import conv_block, conv_chain, linear_block
from pefll.backend.fused import fused
from pefll.models import EMBEDDINGS, MODELS, Hypernetwork, Network, build_embedding, build_model
from tests.models import zoo
from tests.models.same import Do, assert_same


def blocks(module: nn.Module, *inputs: Tensor) -> list[tuple]:
    """Run a module and return the blocks it used: ("conv", relu, pool) and ("linear", relu)."""
    used: list[tuple] = []

    def conv(*arguments):
        used.append(("conv", *arguments[7:9]))
        return conv_block(*arguments)

    def linear(*arguments):
        used.append(("linear", arguments[-1]))
        return linear_block(*arguments)

    def chain(x, parts, *more):
        used.extend(("conv", *part[-2:]) for part in parts)
        return conv_chain(x, parts, *more)

    ours = {conv_block: conv, linear_block: linear, conv_chain: chain}
    names = type(module).forward.__globals__ if "forward" not in vars(module) else module.forward.__func__.__globals__
    before = {name: value for name, value in names.items() if callable(value) and value in ours}
    try:
        names.update({name: ours[value] for name, value in before.items()})
        module(*inputs)
    finally:
        names.update(before)
    return used


RELUS = {
    "module": lambda: nn.ReLU(),
    "in place": lambda: nn.ReLU(inplace=True),
    "function": lambda: Do(F.relu),
    "function in place": lambda: Do(lambda x: F.relu(x, inplace=True)),
    "torch": lambda: Do(torch.relu),
    "method": lambda: Do(lambda x: x.relu()),
    "method in place": lambda: Do(lambda x: x.relu_()),
}
POOLS = {
    "module": lambda: nn.MaxPool2d(2),
    "module, pair": lambda: nn.MaxPool2d((2, 2), stride=(2, 2)),
    "function": lambda: Do(lambda x: F.max_pool2d(x, 2)),
    "function, stride": lambda: Do(lambda x: F.max_pool2d(x, kernel_size=2, stride=2)),
    "torch": lambda: Do(lambda x: torch.max_pool2d(x, 2)),
}


def shift(x: Tensor) -> Tensor:
    return x - 0.1


class Conv(nn.Module):
    """A convolution as a function."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__()
        self.inner = nn.Conv2d(*arguments, **options)

    def forward(self, x):
        c = self.inner
        return F.conv2d(x, c.weight, c.bias, c.stride, padding=c.padding, dilation=c.dilation, groups=c.groups)


@st.composite
def networks(draw) -> tuple[nn.Module, tuple[int, ...]]:
    """A small convolutional network, and the shape of what it takes."""
    layers: list[nn.Module] = []
    channels = draw(st.integers(1, 4))
    height, width = draw(st.integers(6, 12)), draw(st.integers(6, 12))
    shape = (draw(st.integers(1, 3)), channels, height, width)
    for _ in range(draw(st.integers(1, 3))):
        kernel, padding = draw(st.integers(1, 3)), draw(st.integers(0, 1))
        groups = draw(st.sampled_from([1, channels]))
        out = groups * draw(st.integers(1, 3))
        options = {
            "stride": draw(st.integers(1, 2)),
            "padding": padding,
            "dilation": draw(st.integers(1, 2)),
            "groups": groups,
            "bias": draw(st.booleans()),
        }
        reach = options["dilation"] * (kernel - 1) + 1
        height, width = ((side + 2 * padding - reach) // options["stride"] + 1 for side in (height, width))
        if min(height, width) < 1:
            break
        layers.append(draw(st.sampled_from([nn.Conv2d, Conv]))(channels, out, kernel, **options))
        channels = out
        after = draw(st.permutations(["relu", "pool", "shift"]))[: draw(st.integers(0, 3))]
        for what in after:
            if what == "relu":
                layers.append(RELUS[draw(st.sampled_from(sorted(RELUS)))]())
            elif what == "shift":
                layers.append(Do(shift))
            elif min(height, width) >= 2:
                layers.append(POOLS[draw(st.sampled_from(sorted(POOLS)))]())
                height, width = height // 2, width // 2
    layers += [nn.Flatten(), nn.LazyLinear(draw(st.integers(1, 5)), bias=draw(st.booleans()))]
    if draw(st.booleans()):
        layers += [nn.ReLU(), nn.LazyLinear(3)]
    module = nn.Sequential(*layers)
    with torch.no_grad():
        module(torch.zeros(shape))
    return module, shape


@given(networks(), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_random_networks_compute_the_same(case, seed):
    module, shape = case
    torch.manual_seed(seed)
    assert_same(module, torch.randn(shape))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_packages_models_compute_the_same(name):
    shape = (12,) if name == "lstm" else (3, 20, 18)
    x = torch.randint(0, 5, (4, *shape)) if name == "lstm" else torch.randn(4, *shape)
    assert_same(build_model(name, shape, 5), x)


@pytest.mark.parametrize("name", ["lstm", "lstm-unlabeled"])
def test_embeddings_of_text_compute_the_same(name):
    module = build_embedding(name, (12,), 5, 7, tokens=True)
    assert_same(module, torch.randint(0, 5, (6, 12)), torch.randint(0, 5, (6,)))


@pytest.mark.parametrize("name", sorted(name for name in EMBEDDINGS if not name.startswith("lstm")))
@pytest.mark.parametrize("side", [8, 16])
def test_the_packages_embeddings_compute_the_same(name, side):
    module = build_embedding(name, (1, side, side), 5, 7, tokens=False)
    x, y = torch.randn(6, 1, side, side), torch.randint(0, 5, (6,))
    assert_same(module, x, y)
    kinds = [kind for kind, *_ in blocks(fused(module.float()), x, y)]
    assert kinds.count("conv") == (2 if name.startswith("convnet") or name == "two" else 0)
    of_convnet = 3 if side == 16 else 2
    few = {"linear": 1, "mlp": 2, "mlp-unlabeled": 2, "two": of_convnet + 1}  # "two" has a linear part beside
    assert kinds.count("linear") == few.get(name, of_convnet)


def test_the_hypernetwork_and_users_models_compute_the_same():
    assert_same(Hypernetwork(5, 40), torch.randn(3, 5))
    assert_same(zoo.tied((6,), 3), torch.randn(4, 6))
    assert_same(zoo.normalised((6,), 3), torch.randn(4, 6))


def test_lenet_becomes_five_blocks():
    module = build_model("lenet", (3, 32, 32), 10)
    expected = [("conv", True, 2), ("conv", True, 2), ("linear", True), ("linear", True), ("linear", False)]
    assert blocks(fused(module), torch.randn(2, 3, 32, 32)) == expected


@given(networks(), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_random_networks_alone_in_float32_compute_the_same_exactly(case, seed):
    """With whole numbers nothing is rounded, so that every layout in memory has to give the same bits."""
    module, shape = case
    draw = torch.Generator().manual_seed(seed)
    module = nn.Sequential(*(layer for layer in module if not isinstance(layer, Do) or layer.function is not shift))
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.randint(-1, 2, value.shape, generator=draw))
    x = torch.randint(-1, 2, shape, generator=draw).float()
    results = []
    for which in (module, fused(module)):
        leaf = x.clone().requires_grad_()
        y = which(leaf)
        gradient = torch.autograd.grad(y.sum(), [leaf, *module.parameters()])
        results.append((y, *gradient))
    for wanted, got in zip(*results, strict=True):
        assert torch.equal(wanted, got)


def test_blocks_that_feed_only_each_other_are_one_chain():
    names = fused(build_model("lenet", (3, 32, 32), 10)).forward.__func__.__code__.co_names
    assert [name for name in names if "conv_" in name] == ["pefll_backend_blocks_conv_chain"]


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        ([nn.Flatten()], False),
        ([Do(lambda x: x + x), nn.ReLU(), nn.Flatten()], False),
        ([Do(lambda x: x + x), nn.Conv2d(3, 3, 1)], True),
        ([Do(lambda x: F.relu(torch.add(x, 1)).add(x)), nn.Conv2d(3, 3, 1), nn.Flatten()], True),
        ([nn.SiLU(), nn.Conv2d(3, 3, 1)], True),
        ([Do(lambda x: torch.tanh(x) * x.sigmoid()), nn.GELU(), nn.Conv2d(3, 3, 1)], True),
        ([nn.GroupNorm(1, 3), nn.SiLU(), nn.Conv2d(3, 3, 1)], False),
        ([nn.SiLU(), nn.Conv2d(3, 3, 1), nn.GroupNorm(1, 3)], False),  # anywhere in the network
        ([nn.AvgPool2d(2), nn.Conv2d(3, 3, 1)], True),
        ([Do(lambda x: x.flatten(1).reshape(x.shape)), nn.Conv2d(3, 3, 1)], False),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_blocks_know_whether_a_convolution_reads_their_output(end, wanted, alone, monkeypatch):
    before = [nn.Conv2d(1, 3, 3)] if alone else [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3)]
    module = fused(nn.Sequential(*before, *end))
    told = []

    def chain(x, parts, feeds_convolution):
        told.append(feeds_convolution)
        return conv_chain(x, parts, feeds_convolution)

    def block(*arguments):
        told.append(arguments[9])
        return conv_block(*arguments)

    names = module.forward.__func__.__globals__
    monkeypatch.setitem(names, "pefll_backend_blocks_conv_chain", chain)
    monkeypatch.setitem(names, "pefll_backend_blocks_conv_block", block)
    module(torch.randn(2, 1, 8, 8))
    assert told[0] == wanted
    assert told[1:] in ([], [False])  # nothing comes after the last one


def test_channels_stay_outermost_on_a_cpu_where_a_normalisation_reads_them():
    """Of groups, torch's is several times as slow with channels innermost."""
    x = torch.randn(2, 3, 8, 8)
    layers = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2)]
    assert_same(nn.Sequential(*layers), x)
    for feeds, contiguous in ((False, True), (True, False)):
        y = conv_block(x, layers[0].weight, layers[0].bias, 1, 0, 1, 1, False, 1, feeds)
        assert y.is_contiguous() == contiguous


@pytest.mark.parametrize(
    "rows",
    [
        lambda x: x.view(x.size(0), -1),
        lambda x: x.view((2, 3072)),
        lambda x: x.view(size=(2, 3072)),
        lambda x: x.view_as(x.flatten(1)),
        lambda x: x.view(torch.int32).view(torch.float32).flatten(1),
    ],
)
@pytest.mark.parametrize("layers", [1, 2])
def test_views_of_a_convolutions_output_work_in_any_layout(rows, layers):
    convolutions = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(layers)]
    module = nn.Sequential(*convolutions, nn.ReLU(), Do(rows))
    x = torch.randn(2, 3, 32, 32)
    assert len(blocks(fused(module), x)) == layers
    torch.testing.assert_close(fused(module)(x), module(x))


@pytest.mark.parametrize("relu", sorted(RELUS))
@pytest.mark.parametrize("pool", sorted(POOLS))
@pytest.mark.parametrize("pool_first", [False, True])
def test_every_way_to_write_relu_and_pooling_is_fused(relu, pool, pool_first):
    after = [POOLS[pool](), RELUS[relu]()] if pool_first else [RELUS[relu](), POOLS[pool]()]
    module = nn.Sequential(nn.Conv2d(2, 3, 3), *after)
    x = torch.randn(2, 2, 9, 9)
    assert blocks(assert_same(module, x), x.double()) == [("conv", True, 2)]


def test_gradients_are_the_same_bit_for_bit_where_values_tie():
    """Among equal values, and at zero, pooling before ReLU sends the gradient where ReLU before pooling does."""
    x = torch.randint(-1, 2, (8, 1, 12, 12)).double()
    module = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten()).double()
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([1.0, -2.0]).reshape(2, 1, 1, 1))
    results = []
    for which in (module, fused(module)):
        leaf = x.clone().requires_grad_()
        y = which(leaf)
        torch.autograd.backward(y, torch.arange(1.0, 1 + y.numel(), dtype=y.dtype).reshape(y.shape))
        results.append((y.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        (nn.MaxPool2d(2, stride=1), "overlaps"),
        (nn.MaxPool2d(2, stride=3), "leaves gaps"),
        (nn.MaxPool2d(2, padding=1), "is padded"),
        (nn.MaxPool2d(2, stride=2, dilation=2), "is dilated"),
        (nn.MaxPool2d(2, ceil_mode=True), "keeps the border"),
        (nn.MaxPool2d((2, 3)), "is not square"),
        (nn.AvgPool2d(2), "is a mean"),
        (Do(lambda x: F.max_pool2d(x, 2, 1)), "overlaps, as a function"),
        (Do(lambda x: F.max_pool2d(x, 2, ceil_mode=True)), "keeps the border, as a function"),
        (Do(lambda x: F.max_pool2d(x, (2, 3))), "is not square, as a function"),
        (Do(lambda x: F.max_pool2d(x, 2, return_indices=True)[0]), "tells the places"),
        (Do(lambda x: F.leaky_relu(x)), "is another nonlinearity"),
        (nn.ReLU6(), "has an upper end"),
    ],
)
def test_other_pooling_and_activations_are_not_fused(pool, why):
    module = nn.Sequential(nn.Conv2d(2, 3, 3), pool)
    x = torch.randn(2, 2, 9, 9)
    assert blocks(assert_same(module, x), x.double()) == [("conv", False, 1)], why


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 3, 3, padding="same"),
        nn.ConvTranspose2d(2, 3, 3),
    ],
)
def test_other_convolutions_are_not_fused(convolution):
    module = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(2, 2, 9, 9)
    module(x)
    assert blocks(assert_same(module, x), x.double()) == [("linear", False)]


def test_padding_in_words_that_means_none_is_fused():
    x = torch.randn(2, 2, 9, 9)
    assert blocks(assert_same(nn.Conv2d(2, 3, 3, padding="valid"), x), x.double()) == [("conv", False, 1)]


class TwoUsers(nn.Module):
    """What the convolution gives is used twice: with ReLU and without."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3)
        self.linear = nn.Linear(7, 7)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y = F.relu(y) + y if not self.in_place else y.relu_() * y
        z = self.linear(y)
        return F.relu(z) + z


@pytest.mark.parametrize("in_place", [False, True])
def test_a_layer_with_other_users_is_not_fused(in_place):
    x = torch.randn(2, 2, 9, 9)
    module = TwoUsers(in_place)
    assert blocks(assert_same(module, x), x.double()) == [("conv", False, 1), ("linear", False)]


class Overwritten(nn.Module):
    """The input is changed after the convolution has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = self.conv(x)
        x.mul_(3)
        return F.relu(y) + x


def test_a_block_reads_its_input_when_the_convolution_did():
    module, x = Overwritten().double(), torch.randn(2, 2, 4, 4).double()
    assert fused(module) is not module
    with torch.no_grad():
        assert torch.equal(fused(module)(x), module(x))


def test_only_one_of_two_poolings_is_fused():
    module = nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2), nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randn(2, 1, 10, 10)
    assert blocks(assert_same(module, x), x.double()) == [("conv", True, 2)]


def test_linear_layers_take_any_number_of_axes():
    assert_same(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(3, 6, 4))


def test_one_picture_without_a_batch_axis():
    assert_same(nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2)), torch.randn(2, 8, 8))


def test_constants_follow_the_parameters_type():
    network = Network(zoo.tied((6,), 3))
    assert network(network.init(0, "x").double(), torch.randn(2, 6).double()).dtype == torch.float64


def test_a_networks_own_module_is_the_users():
    module = build_model("cnn", (1, 8, 8), 3)
    network = Network(module)
    assert network.module is module
    before = [value.clone() for value in module.parameters()]
    theta = network.init(0, "x")
    network(theta, torch.randn(2, 1, 8, 8))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
    assert "forward" not in vars(network.with_parameters(theta))
    with pytest.raises(RuntimeError):
        network(theta, torch.randn(2, 5, 8, 8))
    assert all(value.requires_grad for value in module.parameters())  # they are back also after a failure
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
