"""Columns of tables of predictions, in data frames and in CSV files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.data.samples import BOOLEANS, Array

# With more classes than this, a table has a column for each class only if a user asks for them.
FEW_CLASSES = 20


def data_frame(content: Any, index: Any = None) -> Any:
    """Return a pandas data frame of columns by name, or of rows; PefllError without pandas."""
    try:
        import pandas
    except ImportError as error:
        raise PefllError("a data frame needs pandas: pip install pandas", code="PEFLL-T627") from error
    return pandas.DataFrame(content, index=index)


def client_column(name: str, others: Collection[str]) -> str:
    """Return the name of the column of clients: `name`, or "client" if another column has that name."""
    return "client" if name in others else name


def named(labels: Array, names: Sequence[str]) -> Any:
    """Return classes [N] as the training data had them; numbers unchanged; sets [N, k] as a list of rows.

    Classes with `names` are these texts, but False and True are booleans. Classes without are their numbers.
    """
    if labels.ndim > 1:
        return list(labels)
    if tuple(names) == BOOLEANS:
        return labels == 1
    return np.asarray(names)[labels] if len(names) else labels


def probability_columns(
    probabilities: Array | None, predicted: Array, names: Sequence[str], each: bool | None = None
) -> dict[str, Any]:
    """Return the columns of probabilities, by name; none without probabilities.

    `probability` is that of the predicted class, [N]. `probability_NAME` is that of a class, [N]. For sets,
    `probability` has those of all members, N times [k].

    Args:
        probabilities: [N, k], or None.
        predicted: the classes [N], or the sets [N, k].
        names: the name of each class; empty for numbers.
        each: whether there is a column for each class; None for at most `FEW_CLASSES` classes.
    """
    if probabilities is None:
        return {}
    if predicted.ndim > 1:
        return {"probability": list(probabilities)}
    found = {"probability": np.take_along_axis(probabilities, predicted[:, None], axis=1)[:, 0]}
    if each or (each is None and probabilities.shape[1] <= FEW_CLASSES):
        names = names or tuple(map(str, range(probabilities.shape[1])))
        found |= {f"probability_{name}": probabilities[:, place] for place, name in enumerate(names)}
    return found
