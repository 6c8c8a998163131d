"""Leaves out samples before a partition: clients with few samples, and rows with missing values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pefll.core.arguments import text, whole_number
from pefll.core.errors import PefllError, unknown
from pefll.core.wording import argument, counted, first_few
from pefll.data.id_columns import id_notes
from pefll.data.label_advice import one_hot_note
from pefll.data.samples import Array, Samples

MISSING = ("impute", "drop", "drop-unlabelled", "refuse")


def selected(samples: Samples, missing: str = "impute", min_samples: int = 1) -> tuple[Samples, list[str]]:
    """Return the samples that a user wants, and sentences that say what was left out, or what labels may be.

    Args:
        samples: the samples of a table, or others.
        missing: "impute" and "drop-unlabelled" keep rows with missing values, "drop" leaves them out, "refuse" raises
            PefllError. Rows without a label are left out earlier, with "drop" and "drop-unlabelled"; see
            `column_use.Use`.
        min_samples: clients with fewer samples are left out. They are not kept as unseen ones, because accuracies of
            unseen clients would then be those of the clients with least data.
    """
    if text(missing, "missing", "impute") not in MISSING:
        raise unknown("way to deal with missing values", missing, MISSING)
    least = whole_number(min_samples, argument("min_samples"), 1)
    notes = [note] if (note := one_hot_note(samples)) else []
    notes += id_notes(samples)
    if samples.unlabelled:
        total = len(samples.x) + samples.unlabelled
        notes.append(f"{samples.name}: {counted(samples.unlabelled, 'row')} of {total:,} without a label left out")
    if missing in ("drop", "refuse") and samples.table:
        gaps = np.isnan(samples.x)
        if missing == "refuse" and gaps.any():
            column = int(gaps.any(axis=0).argmax())
            raise PefllError(
                f"{samples.name}: column {samples.feature_names[column]!r} has no value in row "
                f"{int(gaps[:, column].argmax()) + 1:,}; fill it in, or use {argument('missing', 'impute')} or "
                f"{argument('missing', 'drop')}",
                code="PEFLL-D600",
            )
        complete = np.asarray(~gaps.any(axis=1))
        if not complete.all():
            left = int((~complete).sum())
            notes.append(f"{samples.name}: {counted(left, 'row')} of {len(complete):,} with missing values left out")
            samples = _rows(samples, complete, "every row has a missing value")
    if least > 1:
        if samples.client is None:
            raise PefllError(
                f"{samples.name} does not name the client of each sample, so {argument('min_samples')} means nothing; "
                "leave it out",
                code="PEFLL-D601",
            )
        count = np.bincount(samples.client)
        few = np.flatnonzero((count > 0) & (count < least))
        if len(few):
            names = first_few(samples.name_of(client) for client in few[:1_000].tolist())
            total = int((count > 0).sum())
            notes.append(
                f"{samples.name}: {len(few):,} of {counted(total, 'client')} left out, with fewer than "
                f"{counted(least, 'sample')}: {names}"
            )
            samples = _rows(samples, (count >= least)[samples.client], f"no client has {counted(least, 'sample')}")
    return samples, notes


def _rows(samples: Samples, wanted: Array, if_none: str) -> Samples:
    """Return some of the samples; PefllError with the reason `if_none` if none is left."""
    if not wanted.any():
        raise PefllError(f"{samples.name}: {if_none}, so no samples are left; ask for less", code="PEFLL-D602")
    if samples.row is None:
        samples = replace(samples, row=np.arange(len(wanted)))
    arrays = {name: getattr(samples, name) for name in ("x", "y", "client", "split", "time", "row")}
    return replace(samples, **{name: array[wanted] for name, array in arrays.items() if array is not None})
