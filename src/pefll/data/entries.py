"""The rows of many clients at once."""

from __future__ import annotations

import numpy as np

from pefll.data.federation import Array, Federation


def entries(federation: Federation, split: int, first: int, last: int) -> Array:
    """Return the rows of x and y that clients first..last-1 have in a split, client after client, int64 [R]."""
    offset = federation.offset[split, first:last].cpu().numpy()
    count = federation.count[split, first:last].cpu().numpy()
    start = np.cumsum(count) - count
    place = np.arange(int(count.sum())) + np.repeat(offset - start, count)
    rows: Array = federation.rows.cpu().numpy()[place]
    return rows
