"""A batch on a GPU: gathers and normalises pixels with one kernel, and sums values over samples."""

from __future__ import annotations

import torch
from torch import Tensor

from pefll.backend import client_axis
from pefll.core.reference import fast
from pefll.data import client as plain_client
from pefll.data import federation as plain
from pefll.data.federation import Federation


def _are_pixels_on_gpu(federation: Federation, rows: Tensor, dtype: torch.dtype) -> bool:
    if federation.normalise is None or not federation.holds_images or not federation.x.is_contiguous():
        return False
    return client_axis.available(federation.affine(dtype)[0])


@fast(plain.gather, when=_are_pixels_on_gpu)
def gather(federation: Federation, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return samples `rows` [b], normalised, [b, c, h, w]."""
    return client_axis.pixels(rows, federation.x, *federation.affine(dtype))


@fast(plain_client.weighted_sum, when=lambda weight, values: values.is_cuda)
def weighted_sum(weight: Tensor, values: Tensor) -> Tensor:
    """Return the sum of values [b] or [b, n] with weights [b], in an order that does not depend on other clients."""
    # In a matrix product of cuBLAS the order depends on the number of clients.
    return ((weight[:, None] if values.dim() > 1 else weight) * values).sum(dim=0)
