"""Channel statistics of images, from the training samples of seen clients; and whether other images fit them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from pefll.data.federation import Federation
from pefll.data.samples import TRAIN, Array, Normalise

_BLOCK = 4096
# Pixels are on another scale if their deviation is this many times smaller or larger than in training, and if they are
# dark, too, where it is smaller: a client may have photographs of one colour. Pixels 0..16 are 16 times too small.
_FACTOR, _DARK = 8.0, 4.0
_LOOKED_AT, _VALUES = 200, 4_000_000  # images, and their values, which take eight times the memory


def with_channel_stats(federation: Federation) -> Federation:
    """Return the federation with channel statistics; the same federation if it has them or needs none.

    Samples of unseen clients and of validation and test are ignored, because they must not influence training.
    """
    if not federation.holds_images or federation.normalise is not None or federation.num_seen == 0:
        return federation
    rows = federation.rows_of_clients(TRAIN, 0, federation.num_seen)
    channels = federation.x.shape[1]
    # Count each of the 256 values. Counts are exact; sums of floats would depend on the order of samples.
    table = np.zeros((channels, 256), dtype=np.int64)
    for start in range(0, len(rows), _BLOCK):
        block = federation.x[torch.from_numpy(rows[start : start + _BLOCK])].numpy()
        for channel in range(channels):
            table[channel] += np.bincount(block[:, channel].reshape(-1), minlength=256)
    values = np.arange(256) / 255
    total = table.sum(axis=1)
    mean = table @ values / total
    variance = (table * (values - mean[:, None]) ** 2).sum(axis=1) / total
    std = np.where(variance > 0, np.sqrt(variance), 1.0)  # a constant channel is only shifted
    return replace(federation, normalise=Normalise(tuple(mean.tolist()), tuple(std.tolist())))


def other_scale(x: Array, normalise: Normalise) -> str:
    """Return a sentence if images, uint8 [N, C, H, W], are on another scale than those of training; "" if not.

    Channels of one value say nothing, such as that of opacity.
    """
    x = x[:: math.ceil(len(x) / max(1, min(_LOOKED_AT, _VALUES // x[0].size)))]
    found, brightest = x.std(axis=(0, 2, 3)) / 255, x.max(axis=(0, 2, 3)) / 255
    mean, std = (np.asarray(each) for each in normalise)
    small = (found < std / _FACTOR) & (brightest < (mean + std) / _DARK)
    if not found.any() or not (small | (found > std * _FACTOR))[found > 0].all():
        return ""
    return (
        f"the pixels of these samples are on another scale than in training: up to {x.max()}, and in training "
        f"{255 * mean.mean():.3g} ± {255 * std.mean():.3g}; scale them as the training data, for example to 0..255"
    )
