"""Labels of which some are missing: the labels that a new client's data has are used, the others are not needed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pefll.core.arguments import plain
from pefll.core.errors import PefllError
from pefll.core.wording import argument, counted
from pefll.data.arrays import as_array, check_whole
from pefll.data.raw_columns import is_missing
from pefll.data.samples import Array


def has_label(y: Array) -> Array:
    """Return which of the labels y [N] or [N, k] are there, bool [N].

    None, NaN and empty texts are missing labels. With several columns, a label is there if all its columns are.
    """
    if y.dtype.kind == "f":
        there = ~np.isnan(y)
    elif y.dtype.kind in "OUS":
        values = y.reshape(-1).tolist()
        there = ~np.fromiter(map(is_missing, values), dtype=bool, count=len(values)).reshape(y.shape)
    else:
        there = np.ones(y.shape, dtype=bool)
    return np.asarray(there.all(axis=tuple(range(1, y.ndim)))) if y.ndim else there


def without_gaps(y: Array, known: bool = True) -> Array:
    """Return labels without missing ones, as integers or booleans if possible: a gap makes floats or objects of them.

    If it is not `known` what labels are, floats stay floats: they may be classes or numbers, and a user must say which.
    """
    if y.dtype == object and not any(isinstance(value, str) for value in y.reshape(-1)):
        y = np.asarray(y.tolist())
    whole = known and y.dtype.kind == "f" and bool(np.isfinite(y).all()) and bool((y == np.floor(y)).all())
    return y.astype(np.int64) if whole else y


def labels_where(there: Array, y: Array, labels: str, name: str) -> Array:
    """Return the labels y [N] or [N, k] of the rows `there`, bool [N]; see `without_gaps`.

    `labels` says what labels are, or "auto". Errors name rows as the data counts them, also those that are left out.
    """
    if there.all():
        return y
    if labels == "classes" and y.dtype.kind == "f" and y.ndim == 1:
        check_whole(y, "label", name, there, chooses=True)
    return without_gaps(y[there], known=labels != "auto")


def are_truths(y: Array) -> bool:
    """Return whether labels [N] are True and False, of which some may be missing."""
    if y.dtype != object:
        return y.dtype.kind == "b"
    there = [value for value in y.tolist() if not is_missing(value)]
    return bool(there) and all(isinstance(value, bool | np.bool_) for value in there)


def as_numbers(y: Array) -> Array:
    """Return labels [N] of Python numbers and missing values as floats with NaN; other labels unchanged."""
    if y.dtype != object:
        return y
    values = [math.nan if is_missing(value) else value for value in y.tolist()]
    if not all(isinstance(value, int | float | np.number | np.bool_) for value in values):
        return y
    return np.asarray(values, dtype=np.float64)


def as_names(y: Array) -> Array:
    """Return labels [N] of a table as texts, with None for missing ones: 1.0 is "1", because gaps make floats."""
    if y.dtype.kind not in "biufO":
        return y
    values = [None if is_missing(value) else plain(value) for value in y.tolist()]
    whole = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    return np.array([str(value) if isinstance(value, int | float) else value for value in whole], dtype=object)


def check_all_labelled(y: Array, column: str, name: str) -> None:
    """Raise PefllError if some of the labels y [N] or [N, k] are missing: training needs them all."""
    there = has_label(y)
    if there.all():
        return
    if not there.any():
        raise PefllError(
            f"{name}: column {column!r} holds no label at all; fill it in, or name the column of labels with "
            f"{argument('label')}",
            code="PEFLL-D641",
        )
    missing = int((~there).sum())
    raise PefllError(
        f"{name}: column {column!r} has no label in {missing:,} of {counted(len(there), 'row')}, the first of which is "
        f"row {int(there.argmin()) + 1:,}; fill them in, or leave these rows out with "
        f"{argument('missing', 'drop-unlabelled')}",
        code="PEFLL-D640",
    )


def labelled(x: Array, y: Any, needed: bool) -> tuple[Array, Any, int]:
    """Return a new client's samples [m, ...], their labels or None, and how many samples were left out.

    A method that needs labels gets the samples that have one. Any other method gets all samples, and no labels unless
    all are there.

    Args:
        x: [m, ...] samples.
        y: [m] or [m, k] labels, of which some may be missing; None for none.
        needed: whether the method needs labels.
    """
    if y is None:
        return x, None, 0
    labels = as_array(y, "y", "the new client")
    if labels.ndim == 0 or len(labels) != len(x) or (there := has_label(labels)).all():
        return x, y, 0  # labels that do not fit have errors of their own
    if not needed or not there.any():
        return x, None, 0
    return x[there], without_gaps(labels[there]), int((~there).sum())
