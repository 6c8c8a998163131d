"""Makes samples from a table with one row per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pefll.core.arguments import listed, text
from pefll.core.errors import PefllError
from pefll.core.wording import argument
from pefll.data.arrays import order_of, samples_from_arrays
from pefll.data.column_use import AS_IT_IS, Use, chosen_features
from pefll.data.frames import (
    check_owners,
    column,
    columns,
    feature_matrix,
    joined_names,
    label_column,
    label_names,
    raw_columns,
)
from pefll.data.missing_labels import check_all_labelled, has_label, labels_where
from pefll.data.raw_columns import RawColumn
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
    y = label_column(frame, label, name)
    if features is not None and not features:
        raise PefllError(f"{name}: there are no feature columns; name some", code="PEFLL-D158")
    special = (*label_names(label, columns(frame)), client, split)
    if client in special[:-2]:
        raise PefllError(
            f"{name}: {client!r} is the column of labels and that of clients; name another one with "
            f"{argument('label')} or {argument('client', option='--client-column')}",
            code="PEFLL-D673",
        )
    chosen = chosen_features(frame, tuple(features or use.features), special, use, name)
    owner, splits = (None if each is None else column(frame, each, name) for each in (client, split))
    if owner is not None and client is not None:
        check_owners(owner, client, name)
    samples = samples_of_rows(
        frame, label, y, owner, splits, chosen, classes=classes, name=name, use=use, labels=labels
    )
    return replace(samples, client_column=client or "")


def samples_of_rows(
    frame: Any,
    label: str,
    y: Array,
    client: Any,
    split: Any,
    features: Sequence[str],
    *,
    classes: int | None,
    name: str,
    use: Use,
    labels: str,
) -> Samples:
    """Return samples from a table, whose labels y [N] or [N, k], clients [N] and splits [N] are known already.

    The other arguments are those of `from_frame`. `client` and `split` may be None.
    """
    time = order_of(column(frame, use.time, name), use.time, name) if use.time else None
    encodes = use.encode != "none"
    table: tuple[RawColumn, ...] = ()
    if encodes:
        table, x = raw_columns(frame, features, use.treat, name, has_clients=client is not None)
    else:
        x = feature_matrix(frame, features, name)
    there = rows_with_labels(y, label, use, name)
    x, client, split, time = (rows_where(there, each) for each in (x, client, split, time))
    samples = samples_from_arrays(
        # These zeros take no memory. They stand for the table, whose missing values are no samples yet.
        np.broadcast_to(np.float32(0), x.shape) if encodes else x,
        labels_where(there, y, labels, name),
        client,
        split,
        classes,
        name,
        feature_names=features,
        labels=labels,
        label_names=label_names(label, columns(frame)),
    )
    left_out = int((~there).sum())
    values = x if encodes else samples.x
    samples = replace(samples, label_column=label, time_column=use.time)
    row = np.flatnonzero(there) if left_out else None
    return replace(samples, x=values, table=table, time=time, unlabelled=left_out, row=row)


def rows_with_labels(y: Array, label: str, use: Use, name: str) -> Array:
    """Return which rows have a label, bool [N]; PefllError if some have none and `use` refuses them."""
    there = has_label(y)
    if use.unlabelled != "drop" or not there.any():
        check_all_labelled(y, label, name)
    return there


def rows_where(there: Array, values: Any) -> Any:
    """Return some entries of an array; one of another length unchanged, because the check of samples refuses it."""
    return values if values is None or there.all() or len(values) != len(there) else values[there]
