"""Embedding networks φ(x, y) map a sample and its label to a vector; a descriptor is the mean of such vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pefll.core.errors import PefllError, unknown
from pefll.models.convnet import lenet, small_cnn
from pefll.models.lstm import CharLSTM, last_state
from pefll.models.mlp import MLP
from pefll.models.network import Network
from pefll.models.own import Choice, OwnEmbedding, build_own, check_network, is_own

LENET_SIDE = 16  # side of the smallest image for LeNet's two 5x5 convolutions and poolings


def one_hot(y: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return labels [b] one-hot, [b, classes]. Unlike torch's `one_hot` it works inside CUDA graphs."""
    return (y[:, None] == torch.arange(classes, device=y.device)).to(dtype)


def label_values(y: Tensor, classes: int, dtype: torch.dtype, encoded: bool) -> Tensor:
    """Return classes [b] one-hot, [b, classes]; labels that a task has `encoded` already, [b, e], unchanged."""
    return y.to(dtype) if encoded else one_hot(y, classes, dtype)


class ConvEmbedding(nn.Module):
    """The client's convolutional network with the label as extra input planes and the descriptor as output."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, size: int, labels: bool) -> None:
        super().__init__()
        build = lenet if len(input_shape) == 3 and min(input_shape[1:]) >= LENET_SIDE else small_cnn
        self.uses_labels = labels
        self.net = build(input_shape, size, label_classes=classes if labels else 0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Map samples [b, ...] and labels, [b] or encoded [b, e], to [b, size]."""
        output: Tensor = self.net(x, y) if self.uses_labels else self.net(x)
        return output


class MLPEmbedding(nn.Module):
    """One hidden layer over the flattened sample and its one-hot label."""

    encoded = False  # whether labels come as numbers [b, e]

    def __init__(self, input_shape: tuple[int, ...], classes: int, size: int, labels: bool) -> None:
        super().__init__()
        self.uses_labels = labels
        self.classes = classes
        features = int(torch.Size(input_shape).numel()) + (classes if labels else 0)
        self.net = MLP((features,), size, hidden=(100,))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Map samples [b, ...] and labels, [b] or encoded [b, e], to [b, size]."""
        x = x.flatten(1)
        if self.uses_labels:
            x = torch.cat([x, label_values(y, self.classes, x.dtype, self.encoded)], dim=1)
        output: Tensor = self.net(x)
        return output


class LSTMEmbedding(nn.Module):
    """The client's LSTM with the label as one more time step, and the descriptor as output."""

    encoded = False  # whether labels come as numbers [b, e]

    def __init__(self, input_shape: tuple[int, ...], classes: int, size: int, labels: bool) -> None:
        super().__init__()
        self.uses_labels = labels
        self.net = CharLSTM(input_shape, classes)
        self.net.last = nn.Linear(self.net.lstm.hidden_size, size)
        if labels:  # a label need not be a character
            self.label_embedding = nn.Embedding(classes, self.net.lstm.input_size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Map texts int64 [b, length] and labels, [b] or encoded [b, e], to [b, size]."""
        steps = self.net.embedding(x.transpose(0, 1))
        if self.uses_labels:
            weight = self.label_embedding.weight
            label = y.to(weight.dtype) @ weight if self.encoded else self.label_embedding(y)
            steps = torch.cat([steps, label[None]])
        output: Tensor = self.net.last(last_state(self.net.lstm, steps))
        return output


class LinearEmbedding(nn.Module):
    """One linear layer on the one-hot label: the descriptor is a projection of the label histogram."""

    uses_labels = True
    encoded = False  # whether labels come as numbers [b, e]

    def __init__(self, input_shape: tuple[int, ...], classes: int, size: int) -> None:
        super().__init__()
        del input_shape  # it uses labels only
        self.classes = classes
        self.linear = nn.Linear(classes, size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Map labels, [b] or encoded [b, e], to [b, size]."""
        del x
        values = label_values(y, self.classes, self.linear.weight.dtype, self.encoded)
        return F.linear(values, self.linear.weight, self.linear.bias)


class TwoEmbeddings(nn.Module):
    """Two embeddings: one half of the descriptor comes from the sample, the other half from its label."""

    uses_labels = True

    def __init__(self, input_shape: tuple[int, ...], classes: int, size: int) -> None:
        super().__init__()
        if size < 2:
            raise PefllError(
                f"the embedding network 'two' has two parts, but the descriptor has size {size}; make descriptor_size "
                "at least 2",
                code="PEFLL-N035",
            )
        kind = ConvEmbedding if _is_image(input_shape) else MLPEmbedding
        self.of_sample = kind(input_shape, classes, size // 2, labels=False)
        self.of_label = LinearEmbedding(input_shape, classes, size - size // 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Map samples [b, ...] and labels, [b] or encoded [b, e], to [b, size]."""
        return torch.cat([self.of_sample(x, y), self.of_label(x, y)], dim=1)


def _is_image(input_shape: tuple[int, ...]) -> bool:
    return len(input_shape) == 3 and min(input_shape[1:]) >= 8


EMBEDDINGS: dict[str, Callable[[tuple[int, ...], int, int], nn.Module]] = {
    "convnet": partial(ConvEmbedding, labels=True),
    "convnet-unlabeled": partial(ConvEmbedding, labels=False),
    "mlp": partial(MLPEmbedding, labels=True),
    "mlp-unlabeled": partial(MLPEmbedding, labels=False),
    "lstm": partial(LSTMEmbedding, labels=True),
    "lstm-unlabeled": partial(LSTMEmbedding, labels=False),
    "linear": LinearEmbedding,
    "two": TwoEmbeddings,
}


def build_embedding(
    name: Choice, input_shape: tuple[int, ...], classes: int, size: int, tokens: bool, encoded: bool = False
) -> nn.Module:
    """Return an embedding network, which maps samples [b, ...] and labels, [b] or encoded [b, e], to [b, size].

    `"auto"` gives convnet for images, mlp for features and linear for tokens. Tokens can also have lstm and
    lstm-unlabeled.

    Args:
        name: a key of EMBEDDINGS, `"auto"`, `"package.module:function"`, a module, or a function of (input_shape,
            classes, size).
        input_shape: shape of one sample.
        classes: number of classes, or of values of an encoded label.
        size: size of the descriptor.
        tokens: whether samples are tokens.
        encoded: whether labels come as numbers [b, classes].
    """
    if is_own(name):
        net = build_own(name, "embedding", input_shape=input_shape, classes=classes, size=size)
        return OwnEmbedding(net, input_shape, classes, tokens, encoded)
    assert isinstance(name, str)
    if name == "auto":
        name = "linear" if tokens else "convnet" if _is_image(input_shape) else "mlp"
    if name not in EMBEDDINGS:
        raise unknown("embedding network", name, ["auto", *EMBEDDINGS, "your.module:function"])
    of_text = name.startswith("lstm")
    if tokens and not of_text and name != "linear":
        raise PefllError(
            f"the embedding network {name!r} does not take text; use 'lstm', or 'linear' for labels alone",
            code="PEFLL-N020",
        )
    if of_text and not tokens:
        raise PefllError(
            f"the embedding network {name!r} takes text only; use 'auto'",
            code="PEFLL-N036",
        )
    module = EMBEDDINGS[name](input_shape, classes, size)
    for part in module.modules() if encoded else ():
        if hasattr(part, "encoded"):
            part.encoded = encoded  # type: ignore[assignment]
    return module


def build_encoder(choice: Choice, input_shape: tuple[int, ...], classes: int, size: int, tokens: bool) -> nn.Module:
    """Return an embedding network that reads no labels; PefllError if the network reads them.

    `"auto"` gives convnet-unlabeled for images, mlp-unlabeled for features and lstm-unlabeled for tokens.
    """
    if choice == "auto":
        kind = "lstm" if tokens else "convnet" if _is_image(input_shape) else "mlp"
        choice = f"{kind}-unlabeled"
    encoder = build_embedding(choice, input_shape, classes, size, tokens)
    if encoder.uses_labels:
        raise PefllError(
            f"the embedding network {choice!r} reads labels, which an encoder of unlabelled samples must not; use "
            "'auto'",
            code="PEFLL-N570",
        )
    return encoder


def check_embedding(network: Network, size: int) -> None:
    """Raise PefllError unless a user's own embedding network gives descriptors of a size; other networks pass."""
    check_network(network, size, f"make its last layer as wide, or set descriptor_size, which is {size}")
