"""Says what the labels of a table are, so that a typing error among them is seen before training."""

from __future__ import annotations

from typing import Any

import numpy as np

from pefll.core.wording import counted, first_few
from pefll.data.federation import Federation
from pefll.data.samples import Array

_SHOWN = 8  # classes or columns
_LONGEST = 40  # characters of a name
# A class may be a typing error if it has fewer rows than both, in a table of many rows and few classes.
_RARE_SHARE, _RARE_ROWS = 1e-3, 5
_MANY_ROWS, _FEW_CLASSES = 1_000, 20


def label_sentence(federation: Federation) -> str:
    """Return what the labels of a federation are, such as "label 'liked': no 49.7% and yes 50.3%"; "" if unknown."""
    words = label_shares(federation)
    return f"label {federation.label_column[: 2 * _LONGEST]!r}: {words}" if words else ""


def columns_report(federation: Federation) -> list[dict[str, Any]]:
    """Return the rows of `TablePlan.report`, and one more for the labels; only that one for data that is no table."""
    rows = federation.table.report() if federation.table else []
    words = label_shares(federation)
    return [*rows, {"column": federation.label_column, "kind": "label", "inputs": 0, "missing": 0.0, "done": words}]


def label_shares(federation: Federation) -> str:
    """Return what labels there are, such as "no 49.7% and yes 50.3%"; "" if unknown.

    Classes have their shares of all samples, members of sets too, and numbers their range and mean.
    """
    if not len(federation.rows):
        return ""
    if federation.labels == "classes":
        counts = _counts(federation)
        total = counts.sum()
        words = [
            f"{_name(federation, place)} {_share(counts[place] / total)}" for place in np.flatnonzero(counts).tolist()
        ]
    else:
        y = _labels(federation)
        y = y.reshape(len(y), -1)
        words = [_column_words(federation, place, y[:, place]) for place in range(y.shape[1])]
    return first_few(words, _SHOWN)


def rare_classes(federation: Federation) -> list[str]:
    """Return a note for each class that may be a typing error, because almost no sample has it."""
    if federation.labels != "classes" or len(federation.rows) < _MANY_ROWS:
        return []
    counts = _counts(federation)
    total, there = int(counts.sum()), np.flatnonzero(counts)
    if len(there) > _FEW_CLASSES:
        return []
    return [
        f"class {_name(federation, place)!r} has {counts[place]:,} of {counted(total, 'row')}; is it a typing error?"
        for place in there.tolist()
        if counts[place] <= _RARE_ROWS and counts[place] < _RARE_SHARE * total
    ]


def _labels(federation: Federation) -> Array:
    """Return the label of each sample that a client has, [R] or [R, k]."""
    labels: Array = federation.y.cpu().numpy()[federation.rows.cpu().numpy()]
    return labels


def _counts(federation: Federation) -> Array:
    """Return the number of samples of each class, int64 [classes]."""
    return np.bincount(_labels(federation), minlength=federation.classes)


def _name(federation: Federation, place: int) -> str:
    """Return the name of a class, or of a column of y, in one short line."""
    names = federation.class_names
    return " ".join(names[place].split())[:_LONGEST] if place < len(names) else str(place)


def _share(share: float) -> str:
    return "<0.1%" if 0 < share < 1e-3 else f"{share:.1%}"


def _column_words(federation: Federation, place: int, values: Array) -> str:
    """Return what one column of labels [R] has; several columns have their names."""
    several = f"{_name(federation, place)} " if federation.y.ndim > 1 else ""
    if federation.labels == "sets":
        return f"{several}{_share(float((values > 0).mean()))}"
    mean = values.mean(dtype=np.float64)
    return f"{several}{values.min():,.4g} to {values.max():,.4g} (mean {mean:,.4g})"
