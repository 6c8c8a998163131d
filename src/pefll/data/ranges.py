"""Values that are out of proportion: whose they are, which column they are in, and how far they reach."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pefll.core.wording import first_few
from pefll.data.federation import TRAIN, Federation, feature_called, places

# A client's column is out of proportion where it reaches so many times as far as the median client's does. Incomes of
# people differ by a hundred; another unit, or a mark for "missing" such as 1e10, by more.
OUT_OF_PROPORTION = 1e3
# Numbers about 1 are what networks are made for, however small a column's own numbers are.
ORDINARY = 1.0
# A column as large as this at every client, such as a time in seconds since 1970, drowns the others.
UNSCALED = 1e8
# The middle of a column is that of so many samples; and so many columns are looked at, those with the largest numbers.
_SAMPLES, _COLUMNS = 20_000, 1_000
_SHOWN = 3


class Odd(NamedTuple):
    """One client's column that reaches much farther than others'."""

    factor: float
    client: int
    column: int
    low: float
    high: float
    usual: float


def out_of_proportion(federation: Federation) -> list[str]:
    """Return a sentence for each kind of numbers that will spoil training without ending it; none for most data.

    Only training samples are looked at, and pixels and tokens are not. The cost is one pass over the data where no
    value is above 1,000.

    Args:
        federation: whose arrays are on the CPU or on a GPU.
    """
    if "proportion" not in federation._cache:
        federation._cache["proportion"] = _found(federation)
    found: list[str] = federation._cache["proportion"]
    return found


def _found(federation: Federation) -> list[str]:
    if federation.tokens or not federation.x.dtype.is_floating_point or not len(federation.rows):
        return []
    x = federation.x.cpu().numpy().reshape(len(federation.x), -1)
    largest = np.maximum(x.max(axis=0), -x.min(axis=0))
    suspects = np.flatnonzero(largest > OUT_OF_PROPORTION * ORDINARY)
    if not len(suspects):
        return []
    suspects = suspects[np.argsort(-largest[suspects], kind="stable")[:_COLUMNS]]
    count = federation.count[TRAIN].cpu().numpy()
    rows = federation.rows.cpu().numpy()[places(federation.offset[TRAIN].cpu().numpy(), count)]
    starts = np.cumsum(count) - count
    odd, unscaled = [], []
    for column in suspects.tolist():
        values = x[rows, column].astype(np.float64)
        middle = float(np.median(values[:: max(1, len(values) // _SAMPLES)]))
        reach = np.maximum.reduceat(np.abs(values - middle), starts)
        usual = max(float(np.median(reach)), ORDINARY)
        far = np.flatnonzero(reach > OUT_OF_PROPORTION * usual) if len(count) > 2 else starts[:0]
        for client in far.tolist():
            own = values[starts[client] : starts[client] + count[client]]
            odd.append(Odd(reach[client] / usual, client, column, float(own.min()), float(own.max()), usual))
        if not len(far) and abs(middle) + usual > UNSCALED:
            unscaled.append((column, float(values.min()), float(values.max())))
    return [*_about_clients(odd, federation), *_about_columns(unscaled, federation)]


def _about_clients(odd: list[Odd], federation: Federation) -> list[str]:
    if not odd:
        return []
    odd.sort(key=lambda each: -each.factor)
    who = first_few(
        (
            f"client {federation.name_of(each.client)} has {_called(each.column, federation)} from {each.low:.3g} to "
            f"{each.high:.3g}, {each.factor:.1g} times as far as usual"
            for each in odd
        ),
        _SHOWN,
    )
    return [f"{federation.name}: {who}; check these values, since they spoil the training of all clients"]


def _about_columns(unscaled: list[tuple[int, float, float]], federation: Federation) -> list[str]:
    if not unscaled:
        return []
    which = first_few(
        (f"{_called(column, federation)} from {low:.3g} to {high:.3g}" for column, low, high in unscaled), _SHOWN
    )
    return [f"{federation.name}: clients have {which}; scale such columns to about -1..1, or others will not count"]


def _called(column: int, federation: Federation) -> str:
    return feature_called(column, federation.input_shape, federation.feature_names)
