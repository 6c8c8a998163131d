"""Federations of other data than a run's, read and encoded as its training data was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.arguments import shown
from pefll.core.errors import PefllError
from pefll.core.warning import warn
from pefll.core.wording import argument, counted
from pefll.data import read_rows
from pefll.data.arrays import labels_of, samples_from_arrays
from pefll.data.federation import Federation
from pefll.data.frames import index_of, is_frame
from pefll.data.missing_labels import has_label, labels_where
from pefll.data.owners import Columns, Rows, rows_of_frame
from pefll.data.partition import natural
from pefll.data.samples import Normalise
from pefll.data.table_samples import rows_where
from pefll.models.spec import ModelSpec
from pefll.runs.personal import check_input


def is_raw(data: Any) -> bool:
    """Return whether data is a table or the path of a file, which `encoded_federation` takes."""
    return isinstance(data, str | Path) or is_frame(data)


def encoded_federation(
    data: Any,
    columns: Columns,
    spec: ModelSpec,
    labels: str,
    *,
    seed: int,
    validation: float = 0.1,
    test: float = 0.2,
) -> Federation:
    """Return a federation of other data, in which all clients are unseen.

    Args:
        data: a file or folder as for `read_each`, or a table as for `from_frame`.
        columns: names of the columns, and what training did to them.
        spec: of the run's models.
        labels: what labels are: classes, numbers or sets.
        seed: seed of the random splits.
        validation: fraction of each client's training samples that become validation samples.
        test: fraction of each client's samples that become test samples, if the data is not split.
    """
    if not is_raw(data):
        raise PefllError(
            f"the data is {shown(data)}; give a table with named columns, or the path of a file", code="PEFLL-T640"
        )
    if isinstance(data, str | Path):
        name, rows = Path(data).name, read_rows(data, columns, tokens=spec.tokens)
    else:
        name, rows = "the table", rows_of_frame(data, columns, tokens=spec.tokens)
    if rows.y is None:
        raise PefllError(
            f"{name} {rows.no_labels or f'has no labels in {columns.label!r}'}, so nothing can be scored; fill labels "
            f"in, or name the labels with {argument('label')}",
            code="PEFLL-T641",
        )
    if columns.time and rows.time is None and rows.split is None:
        raise PefllError(
            f"{name} has no column {columns.time!r}, by which the run splits the samples of each client; add it, or a "
            "column 'split' with train, validation and test",
            code="PEFLL-T642",
        )
    rows = _labelled(rows, labels, name)
    y = labels_of(rows.y, spec.class_names, name, labels)
    samples = samples_from_arrays(
        check_input(rows.x, spec),
        y,
        rows.client,
        rows.split,
        spec.classes or None,
        name,
        tokens=spec.tokens,
        feature_names=columns.plan.input_names if columns.plan else spec.feature_names,
        labels=labels,
        label_names=spec.class_names,
    )
    samples = dataclasses.replace(
        samples,
        normalise=Normalise(*spec.normalise) if spec.normalise else None,
        class_names=spec.class_names,
        label_column=columns.label,
        client_column=columns.client,
        time_column=columns.time,
        time=rows.time,
        row=rows.row,
    )
    made = natural(samples, seed, unseen=0.0, validation=validation, test=test)
    return dataclasses.replace(made, num_seen=0, table=columns.plan, index=index_of(data) if is_frame(data) else None)


def _labelled(rows: Rows, labels: str, name: str) -> Rows:
    """Return the rows that have a label; warn of the others."""
    there = has_label(rows.y)
    if there.all():
        return rows
    warn(f"{name}: {int((~there).sum()):,} of {counted(len(there), 'row')} left out, because they have no label")
    x, client, split, time = (rows_where(there, each) for each in (rows.x, rows.client, rows.split, rows.time))
    return Rows(x, labels_where(there, rows.y, labels, name), client, split, time=time, row=np.flatnonzero(there))
