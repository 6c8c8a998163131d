"""The networks: their sizes, their equals written another way, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vjp

from pefll.core.errors import PefllError
from pefll.models import (
    MLP,
    CharLSTM,
    Hypernetwork,
    Network,
    ResNet20,
    build_embedding,
    build_model,
    check_model,
    lenet,
    resolve_model,
    small_cnn,
)
from pefll.models.convnet import LabelConv2d
from pefll.models.embedding import one_hot


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("shape", "classes", "parameters"),
    [((3, 32, 32), 10, 121_182), ((3, 32, 32), 100, 128_832), ((1, 32, 32), 62, 124_802)],
)
def test_lenet_has_the_papers_number_of_parameters(shape, classes, parameters):
    network = Network(lenet(shape, classes))
    assert network.size == parameters == count(network.module)
    check_model(network, shape, classes, tokens=False)


def test_resnet_has_the_papers_number_of_parameters_and_no_state():
    network = Network(build_model("resnet20", (3, 32, 32), 10))
    assert network.size == 270_906
    check_model(network, (3, 32, 32), 10, tokens=False)


def test_resnet_halves_the_picture_twice_and_doubles_the_channels():
    net = ResNet20((1, 28, 20), 5)
    z = torch.randn(2, 1, 28, 20)
    shapes = []
    for block in [net.first, *net.blocks]:
        z = block(z)
        shapes.append(tuple(z.shape[1:]))
    assert shapes == [(16, 28, 20)] * 4 + [(32, 14, 10)] * 3 + [(64, 7, 5)] * 3


def test_resnet_takes_pictures_only():
    with pytest.raises(PefllError, match="PEFLL-N018"):
        ResNet20((16,), 10)


def test_lenet_is_convolve_relu_pool_twice_and_three_layers():
    """Our pooling comes before the ReLU; the textbook's order gives the same."""
    net = lenet((3, 20, 20), 7).double()
    x = torch.randn(4, 3, 20, 20, dtype=torch.float64)
    z = F.max_pool2d(F.relu(net.conv1(x)), 2)
    z = F.max_pool2d(F.relu(net.conv2(z)), 2).flatten(1)
    wanted = net.full[2](F.relu(net.full[1](F.relu(net.full[0](z)))))
    torch.testing.assert_close(net(x), wanted, rtol=0, atol=1e-12)
    assert [layer.out_features for layer in net.full] == [120, 84, 7]
    assert net.conv1.weight.shape == (16, 3, 5, 5)
    assert net.conv2.weight.shape == (32, 16, 5, 5)


def test_labels_as_biases_equal_a_convolution_over_one_hot_planes():
    layer = LabelConv2d(3, 5, 16, 5).double()
    x = torch.randn(6, 3, 12, 11, dtype=torch.float64)
    y = torch.tensor([0, 4, 2, 2, 1, 3])
    planes = F.one_hot(y, 5).double()[:, :, None, None].expand(-1, -1, 12, 11)
    wanted = F.conv2d(torch.cat([x, planes], dim=1), layer.weight, layer.bias)
    torch.testing.assert_close(layer(x) + layer.of_labels(y), wanted, rtol=0, atol=1e-12)


def test_a_network_with_labels_is_one_over_one_hot_planes():
    net = lenet((3, 20, 21), 7, label_classes=5).double()
    x, y = torch.randn(6, 3, 20, 21, dtype=torch.float64), torch.tensor([0, 4, 2, 2, 1, 3])
    planes = F.one_hot(y, 5).double()[:, :, None, None].expand(-1, -1, 20, 21)
    hidden = F.max_pool2d(F.relu(F.conv2d(torch.cat([x, planes], dim=1), net.conv1.weight, net.conv1.bias)), 2)
    hidden = F.max_pool2d(F.relu(net.conv2(hidden)), 2).flatten(1)
    for layer in net.full[:-1]:
        hidden = F.relu(layer(hidden))
    torch.testing.assert_close(net(x, y), net.full[-1](hidden), rtol=0, atol=1e-12)


def test_one_hot_is_torchs():
    y = torch.tensor([2, 0, 1, 2])
    assert torch.equal(one_hot(y, 4, torch.float32), F.one_hot(y, 4).float())


def test_small_pictures_use_the_small_network_and_too_small_ones_are_refused():
    assert small_cnn((1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert resolve_model("auto", (1, 8, 8)) == "cnn"
    assert resolve_model("auto", (3, 32, 32)) == "lenet"
    assert resolve_model("auto", (3, 4, 4)) == "mlp"
    assert resolve_model("auto", (30,)) == "mlp"
    assert resolve_model("auto", (80,), tokens=True) == "lstm"
    assert resolve_model("mlp", (3, 32, 32)) == "mlp"
    with pytest.raises(PefllError, match=r"for 5x5.*PEFLL-N019"):
        lenet((3, 8, 8), 10)
    with pytest.raises(PefllError, match=r"'mlp', or 'auto'.*PEFLL-N018"):
        lenet((30,), 10)


def test_mlp_flattens_and_has_relu_between_layers():
    net = MLP((2, 3), 4, hidden=(5, 7)).double()
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    a, b, c = net.layers
    torch.testing.assert_close(net(x), c(F.relu(b(F.relu(a(x.flatten(1)))))), rtol=0, atol=0)


def test_lstm_equals_torchs_and_has_leafs_size():
    net = CharLSTM((80,), 80)
    assert count(net) == 819_920
    assert (net.embedding.embedding_dim, net.lstm.hidden_size, net.lstm.num_layers) == (8, 256, 2)
    small = CharLSTM((9,), 12, embedding=5, hidden=7).double()
    x = torch.randint(0, 12, (4, 9))
    states, _ = small.lstm(small.embedding(x))
    torch.testing.assert_close(small(x), small.last(states[:, -1]), rtol=0, atol=1e-12)


def test_lstm_can_be_mapped_over_clients_with_gradients():
    network = Network(CharLSTM((5,), 6, embedding=3, hidden=4))
    theta = torch.randn(3, network.size, dtype=torch.float64)
    x = torch.randint(0, 6, (3, 2, 5))

    def loss(parameters, texts):
        return network(parameters, texts).square().sum()

    mapped = torch.vmap(torch.func.grad(loss))(theta, x)
    alone = torch.stack([torch.func.grad(loss)(t, each) for t, each in zip(theta, x, strict=True)])
    torch.testing.assert_close(mapped, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "hidden"), [("S", 1), ("M", 3), ("L", 5)])
def test_hypernetwork_layers(size, hidden):
    net = Hypernetwork(26, 1000, size).double()
    assert len(net.hidden) == hidden
    assert count(net) == (26 * 100 + 100) + hidden * (100 * 100 + 100) + (100 * 1000 + 1000)
    v = torch.randn(4, 26, dtype=torch.float64)
    z = net.first(v)
    for layer in net.hidden:
        z = layer(F.relu(z))
    torch.testing.assert_close(net(v), net.last(z), rtol=0, atol=0)


def test_hypernetwork_is_mapped_and_pulled_back():
    network = Network(Hypernetwork(3, 11, "S"))
    eta = network.init(0, "h").double()
    v = torch.randn(4, 3, dtype=torch.float64)
    theta, pullback = vjp(network, eta, v)
    torch.testing.assert_close(theta, torch.vmap(lambda one: network(eta, one[None])[0])(v), rtol=0, atol=1e-12)
    weights = torch.randn(4, 11, dtype=torch.float64)
    d_eta, d_v = pullback(weights)
    leaf, point = eta.clone().requires_grad_(), v.clone().requires_grad_()
    (network(leaf, point) * weights).sum().backward()
    torch.testing.assert_close(d_eta, leaf.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(d_v, point.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["convnet", "convnet-unlabeled", "mlp", "mlp-unlabeled", "linear", "two"])
@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 8, 8)])
def test_embeddings_map_samples_and_labels_to_descriptors(name, shape):
    network = Network(build_embedding(name, shape, 5, 6, tokens=False))
    eta = network.init(0, "e")
    x, y = torch.randn(4, *shape), torch.tensor([0, 1, 4, 1])
    v = network(eta, x, y)
    assert v.shape == (4, 6)
    differs_by_label = not torch.equal(v, network(eta, x, (y + 1) % 5))
    assert differs_by_label == network.module.uses_labels == (not name.endswith("unlabeled"))
    assert torch.equal(v, network(eta, torch.zeros_like(x), y)) == (name == "linear")


@pytest.mark.parametrize("name", ["lstm", "lstm-unlabeled"])
def test_embeddings_of_texts(name):
    network = Network(build_embedding(name, (4,), 5, 6, tokens=True))
    eta = network.init(0, "e")
    x, y = torch.randint(0, 5, (3, 4)), torch.tensor([0, 1, 4])
    v = network(eta, x, y)
    assert v.shape == (3, 6)
    differs_by_label = not torch.equal(v, network(eta, x, (y + 1) % 5))
    assert differs_by_label == network.module.uses_labels == (name == "lstm")
    assert not torch.equal(v, network(eta, (x + 1) % 5, y))
    module = network.with_parameters(eta)
    texts = torch.cat(
        [module.net.embedding(x), module.label_embedding(y)[:, None]] if name == "lstm" else [module.net.embedding(x)],
        dim=1,
    )
    torch.testing.assert_close(v, module.net.last(module.net.lstm(texts)[0][:, -1]))
    with pytest.raises(PefllError, match="PEFLL-N036"):
        build_embedding(name, (3, 8, 8), 5, 6, tokens=False)


def test_which_embedding_auto_is():
    def kind(shape, tokens=False):
        return type(build_embedding("auto", shape, 5, 6, tokens)).__name__

    assert kind((3, 32, 32)) == kind((1, 8, 8)) == "ConvEmbedding"
    assert kind((30,)) == kind((1, 4, 4)) == "MLPEmbedding"
    assert kind((80,), tokens=True) == "LinearEmbedding"
    with pytest.raises(PefllError, match="PEFLL-N020"):
        build_embedding("mlp", (80,), 5, 6, tokens=True)


def test_unknown_models_are_named_with_the_nearest_known_one():
    with pytest.raises(PefllError, match=r"did you mean 'lenet'.*PEFLL-A101"):
        build_model("lenett", (3, 32, 32), 10)
    assert isinstance(build_model("auto", (6,), 3), MLP)


def test_the_lstm_does_not_take_pictures():
    with pytest.raises(PefllError, match="PEFLL-N005"):
        check_model(Network(build_model("lstm", (3, 32, 32), 10)), (3, 32, 32), 10, tokens=False)
