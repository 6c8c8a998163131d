"""Learns what to do with the columns of a table, from training rows of seen clients alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from pefll.core.errors import PefllError
from pefll.data.column_plan import ColumnPlan
from pefll.data.raw_columns import CALENDAR, CATEGORY, MOST_VALUES, TEXT, Array, RawColumn
from pefll.data.table_plan import TablePlan

# A value that only one seen client has gets no input: the plan is in every model file and would give it away.
_CLIENTS_PER_VALUE = 2


def learn(raw: Sequence[RawColumn], x: Array, rows: Array, owner: Array, name: str) -> TablePlan:
    """Return the plan for a table, learned from some of its rows alone.

    Args:
        raw: the columns of the table.
        x: float64 [N, columns], their raw values.
        rows: int64 [R], the training rows of seen clients.
        owner: int64 [R], the client of each of these rows.
        name: name of the data, for errors.
    """
    plan = TablePlan(tuple(_learn_column(column, x[rows, place], owner) for place, column in enumerate(raw)))
    if not plan.used:
        reasons = ", ".join(f"{each.name!r} ({each.left_out})" for each in plan.columns[:5])
        raise PefllError(
            f"{name}: no column is left to learn from: {reasons}; add columns whose values differ", code="PEFLL-D580"
        )
    return plan


def _learn_column(column: RawColumn, values: Array, owner: Array) -> ColumnPlan:
    present = ~np.isnan(values)
    seen = values[present]
    missing = round(1 - len(seen) / max(1, len(values)), 6)
    indicator = 0 < len(seen) < len(values)
    plan = partial(ColumnPlan, column.name, column.kind, missing=missing)
    if not len(seen):
        return plan(left_out="all its values are missing in training rows")
    if column.kind == CATEGORY:
        kept, others = _frequent_values(column, seen.astype(np.int64), owner[present])
        if not kept and not indicator:
            return plan(left_out="no value is common to several clients")
        if len(kept) + others == 1 and not indicator:
            return plan(left_out="it has one value only in training rows")
        return plan(values=kept, others=others, indicator=indicator)
    if column.kind == TEXT:
        return plan(indicator=indicator)
    if float(seen.min()) == float(seen.max()):
        if not indicator:
            return plan(left_out="it has one value only in training rows")
        return plan(mean=float(seen[0]), indicator=True)
    if column.kind == CALENDAR:
        return plan(hours=bool((seen != np.floor(seen)).any()), indicator=indicator)
    deviation = float(f"{seen.std():.4g}") or 1.0
    # Rounded, so that sums that differ in the last bit, as on another machine, give the same plan.
    mean = round(float(seen.mean()), 4 - math.floor(math.log10(deviation)))
    return plan(mean=mean, deviation=deviation, indicator=indicator)


def _frequent_values(column: RawColumn, codes: Array, owner: Array) -> tuple[tuple[str, ...], bool]:
    """Return the values of a category that get an input each, and whether training rows have other values."""
    count = np.bincount(codes, minlength=len(column.values))
    pairs = np.unique(np.stack([codes, owner], axis=1), axis=0)[:, 0]
    clients = np.bincount(pairs, minlength=len(column.values))
    enough = min(_CLIENTS_PER_VALUE, len(np.unique(owner)))
    ranked = [code for code in np.argsort(-count, kind="stable").tolist() if clients[code] >= enough]
    kept = sorted(ranked[:MOST_VALUES])
    return tuple(column.values[code] for code in kept), int(count[kept].sum()) < len(codes)
