"""Computes the channel statistics of images from the training samples of seen clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pefll.data.federation import Federation
from pefll.data.samples import TRAIN, Normalise

_BLOCK = 4096


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
