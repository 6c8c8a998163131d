"""A small convolutional network that a user might write: strides instead of pooling, group normalisation, SiLU."""

from __future__ import annotations

from torch import nn


def build(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the network for images (channels, height, width)."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(32 * -(-input_shape[1] // 4) * -(-input_shape[2] // 4), classes),
    )
