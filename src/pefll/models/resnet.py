"""ResNet-20 without normalisation, the paper's larger client model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pefll.models.convnet import check_images

WIDTHS = (16, 32, 64)
BLOCKS = 3


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut: the identity, or a 1x1 projection if the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        same = channels == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, channels, h, w] to [b, width, h / stride, w / stride]."""
        z = self.conv2(F.relu(self.conv1(x)))
        return F.relu(z + self.shortcut(x))


class ResNet20(nn.Module):
    """A 3x3 convolution, three stages of three blocks with 16, 32 and 64 channels, average pooling, a linear layer.

    There is no batch normalisation: no hypernetwork can generate its statistics. Convolutions have no biases, as in the
    original network. For ten classes, colour images and 1x1 projections in shortcuts, only this choice gives the
    paper's number of parameters, D = 270,906.
    """

    def __init__(self, input_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        check_images(input_shape)
        self.first = nn.Conv2d(input_shape[0], WIDTHS[0], 3, padding=1, bias=False)
        blocks, channels = [], WIDTHS[0]
        for width in WIDTHS:
            for place in range(BLOCKS):
                blocks.append(Block(channels, width, stride=2 if place == 0 and width != channels else 1))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Linear(channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [b, channels, h, w] to [b, outputs]."""
        z = self.blocks(F.relu(self.first(x)))
        output: Tensor = self.last(z.mean(dim=(2, 3)))
        return output
