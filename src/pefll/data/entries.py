"""The rows of many clients at once."""

from __future__ import annotations

from pefll.data.federation import Array, Federation, places


def entries(federation: Federation, split: int, first: int, last: int) -> Array:
    """Return the rows of x and y that clients first..last-1 have in a split, client after client, int64 [R]."""
    offset = federation.offset[split, first:last].cpu().numpy()
    count = federation.count[split, first:last].cpu().numpy()
    rows: Array = federation.rows.cpu().numpy()[places(offset, count)]
    return rows
