"""Makes samples from a table with one row per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pefll.core.arguments import listed, text
from pefll.core.errors import PefllError
from pefll.data.arrays import samples_from_arrays
from pefll.data.column_use import AS_IT_IS, Use, chosen_features
from pefll.data.frames import column, columns, feature_matrix, joined_names, label_column, label_names, raw_columns
from pefll.data.raw_columns import DATE, NUMBER, read_column
from pefll.data.samples import Array, Samples


def from_frame(
    frame: Any,
    label: str | Sequence[str],
    client: str | None,
    split: str | None = None,
    features: Sequence[str] | None = None,
    *,
    classes: int | None = None,
    name: str = "frame",
    use: Use = AS_IT_IS,
    labels: str = "auto",
) -> Samples:
    """Return samples from a table with one row per sample.

    Args:
        frame: a pandas or polars data frame, a pyarrow table, or a dictionary of columns.
        label: name of the column of labels; or several names, as a list or with commas between them.
        client: name of the column of clients, or None.
        split: name of the column with train, validation, test; None if the partition chooses the splits.
        features: names of the columns of x, in order; by default those of `use`, or all other columns.
        classes: number of classes; by default the largest label + 1.
        name: name of the data, for errors and records.
        use: how the columns are used.
        labels: what labels are, see `samples_from_arrays`.
    """
    label = joined_names(label)
    label = text(label, "label", "y")
    client, split = (
        None if each is None else text(each, what) for each, what in ((client, "client"), (split, "split"))
    )
    if isinstance(features, str):
        features = (features,)
    elif features is not None:
        features = [text(each, "a feature") for each in listed(features, "features", "['age', 'height']")]
    # Read labels first, so that a missing label column is reported before any error of the features.
    y, label_columns = label_column(frame, label, name), label_names(label, columns(frame))
    if features is not None and not features:
        raise PefllError(f"{name}: there are no feature columns; name some", code="PEFLL-D158")
    chosen = chosen_features(frame, tuple(features or use.features), (*label_columns, client, split), use, name)
    owner, splits = (None if each is None else column(frame, each, name) for each in (client, split))
    time = order_of(column(frame, use.time, name), use.time, name) if use.time else None
    if use.encode == "none":
        x = feature_matrix(frame, chosen, name)
        samples = samples_from_arrays(
            x, y, owner, splits, classes, name, feature_names=chosen, labels=labels, label_names=label_columns
        )
    else:
        samples = samples_of_columns(
            frame,
            chosen,
            use.treat,
            y,
            owner,
            splits,
            classes=classes,
            name=name,
            labels=labels,
            label_names=label_columns,
        )
    return replace(samples, label_column=label, client_column=client or "", time=time)


def samples_of_columns(
    frame: Any,
    features: Sequence[str],
    rules: Mapping[str, str],
    y: Any,
    client: Any = None,
    split: Any = None,
    *,
    classes: int | None = None,
    name: str = "frame",
    labels: str = "auto",
    label_names: Sequence[str] = (),
) -> Samples:
    """Return samples with the raw values of a table's columns `features`, which a partition encodes."""
    table, raw = raw_columns(frame, features, rules, name)
    # These zeros take no memory. They stand for the table, whose missing values are no samples yet.
    zeros = np.broadcast_to(np.float32(0), raw.shape)
    samples = samples_from_arrays(
        zeros, y, client, split, classes, name, feature_names=features, labels=labels, label_names=label_names
    )
    return replace(samples, x=raw, table=table)


def order_of(values: Array, what: str, where: str) -> Array:
    """Return a column of times, given as dates or numbers, as float64 [N]; PefllError for missing times."""
    is_number = values.dtype.kind in "uif"
    times = read_column(values, what, where, rule=NUMBER if is_number else DATE)[1]
    if np.isnan(times).any():
        raise PefllError(
            f"{where}: column {what!r} has no time in row {int(np.isnan(times).argmax()) + 1:,}, so its client's rows "
            "have no order; fill it in, or leave the row out",
            code="PEFLL-D595",
        )
    return times
