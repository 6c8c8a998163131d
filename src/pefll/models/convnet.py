"""Convolutional networks: the paper's LeNet and a smaller one. Both can take the label as a second input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pefll.core.errors import PefllError
from pefll.models.mlp import fully_connected, linear_layers


class LabelConv2d(nn.Conv2d):
    """A convolution over an image and one extra plane per class, which is 1 for the image's label and 0 otherwise.

    Without padding, convolving a constant plane gives a constant. So the planes are never built. Instead each label
    selects one bias per output channel, `of_labels`. The network adds this bias after pooling, which is cheaper.
    """

    encoded = False  # whether labels come as numbers [b, e]

    def __init__(self, channels: int, classes: int, out_channels: int, kernel_size: int) -> None:
        super().__init__(channels + classes, out_channels, kernel_size)
        self.image_channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """Map images [b, channels, h, w] to [b, out_channels, h', w'], without the label's bias."""
        return F.conv2d(x, self.weight[:, : self.image_channels], self.bias)

    def of_labels(self, y: Tensor) -> Tensor:
        """Map labels, classes [b] or encoded [b, e], to their biases [b, out_channels, 1, 1]."""
        of_values = self.weight[:, self.image_channels :].sum(dim=(2, 3)).T
        return (y.to(of_values.dtype) @ of_values if self.encoded else of_values[y])[:, :, None, None]


def check_images(input_shape: tuple[int, ...]) -> None:
    """Raise PefllError unless a shape is that of an image."""
    if len(input_shape) != 3:
        raise PefllError(
            f"a convolutional model needs images (channels, height, width), not samples of shape {input_shape}; choose "
            "the model 'mlp', or 'auto', which fits the data",
            code="PEFLL-N018",
        )


class ConvNet(nn.Module):
    """Two convolutions without padding, each with ReLU and 2x2 max-pooling, then fully connected layers.

    `kernel` is the side of the convolution kernels. `hidden` has the widths of the fully connected layers but the last.
    With `label_classes` C > 0, the network also takes labels, as C one-hot planes.
    """

    def __init__(
        self, input_shape: tuple[int, ...], outputs: int, kernel: int, hidden: tuple[int, ...], label_classes: int = 0
    ) -> None:
        super().__init__()
        check_images(input_shape)
        channels, height, width = input_shape
        sides = [(side - kernel + 1) // 2 - kernel + 1 for side in (height, width)]
        self.pool_twice = min(sides) >= 2  # small images are pooled only once
        if self.pool_twice:
            sides = [side // 2 for side in sides]
        if min(sides) < 1:
            raise PefllError(
                f"images of {height}x{width} are too small for {kernel}x{kernel} convolutions; use the model 'mlp'",
                code="PEFLL-N019",
            )
        self.conv1: nn.Conv2d = (
            LabelConv2d(channels, label_classes, 16, kernel) if label_classes else nn.Conv2d(channels, 16, kernel)
        )
        self.conv2 = nn.Conv2d(16, 32, kernel)
        self.full = linear_layers(32 * sides[0] * sides[1], *hidden, outputs)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Map images [b, channels, h, w], and labels [b] if `label_classes` is set, to [b, outputs]."""
        # Pooling before ReLU gives the same result, and ReLU has only a quarter of the elements.
        x = F.max_pool2d(self.conv1(x), 2)
        if isinstance(self.conv1, LabelConv2d):
            assert y is not None
            x = x + self.conv1.of_labels(y)
        x = F.relu(x)
        x = self.conv2(x)
        x = F.relu(F.max_pool2d(x, 2) if self.pool_twice else x).flatten(1)
        return fully_connected(self.full, x)


def lenet(input_shape: tuple[int, ...], outputs: int, label_classes: int = 0) -> ConvNet:
    """Return the paper's LeNet: 5x5 kernels, hidden fully connected layers of 120 and 84 units."""
    return ConvNet(input_shape, outputs, kernel=5, hidden=(120, 84), label_classes=label_classes)


def small_cnn(input_shape: tuple[int, ...], outputs: int, label_classes: int = 0) -> ConvNet:
    """Return a network for small images: 3x3 kernels, one hidden fully connected layer of 64 units."""
    return ConvNet(input_shape, outputs, kernel=3, hidden=(64,), label_classes=label_classes)
