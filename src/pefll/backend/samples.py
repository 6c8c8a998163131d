"""Operations on a batch on a GPU: gather and normalise pixels with one kernel, and sum values over samples."""

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
    """Return the samples with indices `rows` [b], normalised, as [b, c, h, w]."""
    return client_axis.pixels(rows, federation.x, *federation.affine(dtype))


@fast(plain_client.weighted_sum, when=lambda weight, values: values.is_cuda)
def weighted_sum(weight: Tensor, values: Tensor) -> Tensor:
    """Return the weighted sum of values [b] or [b, n]. The order of additions does not depend on other clients."""
    # A matrix product of cuBLAS would add in an order that depends on the number of clients.
    return ((weight[:, None] if values.dim() > 1 else weight) * values).sum(dim=0)
