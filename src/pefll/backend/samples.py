"""Gathers and normalises a batch of pixels with one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from pefll.backend import client_axis
from pefll.core.reference import fast
from pefll.data.federation import Federation
from pefll.data.federation import gather as plain


def _are_pixels_on_gpu(federation: Federation, rows: Tensor, dtype: torch.dtype) -> bool:
    if federation.normalise is None or not federation.holds_images or not federation.x.is_contiguous():
        return False
    return client_axis.available(federation.affine(dtype)[0])


@fast(plain, when=_are_pixels_on_gpu)
def gather(federation: Federation, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return samples `rows` [b], normalised, [b, c, h, w]."""
    return client_axis.pixels(rows, federation.x, *federation.affine(dtype))
