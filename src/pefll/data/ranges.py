"""Warnings about values that are much larger than the others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pefll.core.wording import first_few
from pefll.data.federation import Federation
from pefll.data.samples import TRAIN, Array, feature_called

# A client's range in a column is the largest distance of its values from the column's median. Warn if a range is this
# many times the median client's. Incomes differ by a factor of 100; wrong units, or 1e10 for "missing", by more.
OUT_OF_PROPORTION = 1e3
# A smaller range counts as this one, because networks expect inputs of about 1.
ORDINARY = 1.0
# A column that exceeds this at every client, for example seconds since 1970, hides the other columns.
UNSCALED = 1e8
# Medians use this many samples. Only this many columns are checked: those with the largest values.
_SAMPLES, _COLUMNS = 20_000, 1_000
_SHOWN = 3


class Odd(NamedTuple):
    """A client's column with `factor` times the usual range."""

    factor: float
    client: int
    column: str  # name and range of the column


def out_of_proportion(federation: Federation) -> list[str]:
    """Return warnings about values that would spoil training; for most data there are none.

    Only training samples are read, and neither pixels nor tokens. If no value exceeds 1,000, one pass suffices.
    """
    if "proportion" not in federation._cache:
        federation._cache["proportion"] = _warnings(federation)
    warnings: list[str] = federation._cache["proportion"]
    return warnings


def _warnings(federation: Federation) -> list[str]:
    if federation.tokens or not federation.x.dtype.is_floating_point or not len(federation.rows):
        return []
    # Inputs made from a table are standardised, so its raw values are looked at, if any is large. They are freed then.
    raw = federation._raw.pop("x", None)
    if federation.table and raw is None:
        return []
    x = federation.x.cpu().numpy().reshape(len(federation.x), -1) if raw is None else raw
    names = tuple(each.name for each in federation.table.columns) if federation.table else federation.feature_names
    largest = np.fmax(np.fmax.reduce(x, axis=0), -np.fmin.reduce(x, axis=0))  # ignoring missing values
    suspects = np.flatnonzero(largest > OUT_OF_PROPORTION * ORDINARY)
    if not len(suspects):
        return []
    suspects = suspects[np.argsort(-largest[suspects], kind="stable")[:_COLUMNS]]
    count = federation.count[TRAIN].cpu().numpy()
    rows = federation.rows_of_clients(TRAIN)
    starts = np.cumsum(count) - count
    far_off: list[Odd] = []
    unscaled: list[str] = []
    for column in suspects.tolist():
        values = x[rows, column].astype(np.float64)
        values = values if federation.table is None else _filled(values)
        middle = float(np.median(values[:: max(1, len(values) // _SAMPLES)]))
        reach = np.maximum.reduceat(np.abs(values - middle), starts)
        usual = max(float(np.median(reach)), ORDINARY)
        far = np.flatnonzero(reach > OUT_OF_PROPORTION * usual) if len(count) > 2 else starts[:0]
        called = feature_called(column, federation.input_shape, names)
        for client in far.tolist():
            own = values[starts[client] : starts[client] + count[client]]
            far_off.append(Odd(reach[client] / usual, client, f"{called} from {own.min():.3g} to {own.max():.3g}"))
        if federation.table is None and not len(far) and abs(middle) + usual > UNSCALED:
            unscaled.append(f"{called} from {values.min():.3g} to {values.max():.3g}")
    warnings = []
    if far_off:
        far_off.sort(key=lambda each: -each.factor)
        who = first_few(
            (
                f"client {federation.name_of(each.client)} has {each.column}, {each.factor:.1g} times the usual range"
                for each in far_off
            ),
            _SHOWN,
        )
        warnings.append(f"{federation.name}: {who}; check these values, since they spoil the training of all clients")
    if unscaled:
        warnings.append(
            f"{federation.name}: clients have {first_few(unscaled, _SHOWN)}; scale such columns to about -1..1, or "
            "training ignores the others"
        )
    return warnings


def _filled(values: Array) -> Array:
    """Return a column with its median in place of missing values."""
    return np.where(np.isnan(values), np.nanmedian(values) if np.isfinite(values).any() else 0.0, values)
