"""Divides the samples of several new clients by client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.wording import argument, counted, similar
from pefll.data import frames
from pefll.data.arrays import as_array, order_of, owners_of
from pefll.data.missing_labels import without_gaps
from pefll.data.raw_columns import BadCell, refuse_cell
from pefll.data.samples import Array
from pefll.data.table_plan import TablePlan, encoded

Name = int | str
CLIENT, SPLIT = "client", "split"  # default names of columns or arrays
_SEVERAL = 10  # so many clients do not all have rare values by chance


class Owned(NamedTuple):
    """One client's name and samples, before any check."""

    client: Name
    x: Array  # [m, ...]
    y: Array | None  # [m] or [m, k], labels as the data has them
    fault: PefllError | None = None  # why the client's rows cannot be used, if a cell of them cannot be read


class Rows(NamedTuple):
    """The samples of several clients in the order of their source, before any check."""

    x: Any  # [N, ...]
    y: Any  # [N] or [N, k], labels as the data has them; None without labels
    client: Any  # [N]
    split: Any = None  # [N]; None if the data is not split
    no_labels: str = ""  # why y is None, in words that go on after the name of a table
    time: Any = None  # float64 [N], which orders each client's samples; None if a table has no column of times
    row: Any = None  # int64 [N], the row of the source; None if no row was left out


class Columns(NamedTuple):
    """Names of a table's columns, or of an .npz's arrays."""

    features: Sequence[str]  # columns of x, in order; empty for all columns but labels, clients and split
    label: str  # column of labels, or several with commas between them; the table may lack it
    client: str  # column of clients
    plan: TablePlan | None = None  # what training did to the features
    time: str = ""  # column of times, if the data is to be split by them
    class_names: Sequence[str] = ()  # names of the classes that labels stand for, if classes have names


def by_client(
    x: Any, y: Any, client: Any, name: str = "arrays", faults: Mapping[int, PefllError] | None = None
) -> list[Owned]:
    """Return the samples of each client, sorted by client, from x [N, ...], y [N] or [N, k] or None, and owners [N].

    `faults` has the errors of rows that cannot be used.
    """
    x = as_array(x, "x", name)
    y = None if y is None else as_array(y, "y", name)
    if x.ndim == 0 or len(x) == 0:
        raise PefllError(f"{name}: there are no samples", code="PEFLL-D134")
    owner, names = owners_of(client, name)
    for what, array in (("client", owner), *((("y", y),) if y is not None else ())):
        if array.ndim not in ((1, 2) if what == "y" else (1,)) or len(array) != len(x):
            raise PefllError(
                f"{name}: x has {counted(len(x), 'sample')} but {what} has the shape {list(array.shape)}; give one "
                "entry per sample",
                code="PEFLL-M032",
            )
    return [
        Owned(names[number], x[rows], _labels_at(y, rows), first_fault(faults or {}, rows))
        for number, rows in rows_by_client(owner, len(names))
    ]


def first_fault(faults: Mapping[int, PefllError], rows: Array) -> PefllError | None:
    """Return the error of the first of some rows that has one, or None."""
    return next((faults[row] for row in rows.tolist() if row in faults), None) if faults else None


def from_frame(
    frame: Any, columns: Columns, y: Any = None, name: str = "the table", *, tokens: bool = False
) -> list[Owned]:
    """Return the samples of each client in a table. If `y` [N] is given, it replaces the table's labels."""
    faults: dict[int, PefllError] = {}
    rows = rows_of_frame(frame, columns, name, tokens=tokens, bad=faults.setdefault)
    owned = by_client(rows.x, rows.y if y is None else y, rows.client, name, faults)
    return [each._replace(x=encoded(each.x)) for each in owned] if columns.plan else owned


def rows_of_frame(
    frame: Any, columns: Columns, name: str = "the table", *, tokens: bool = False, bad: BadCell = refuse_cell
) -> Rows:
    """Return the samples of all clients in a table; `bad` is called for each cell that cannot be read."""
    client = frames.find_column(frame, columns.client, name)
    if client is None:
        raise no_clients(name, f"column {columns.client!r}")
    frames.check_owners(client, columns.client, name)
    several = len(set(map(str, np.asarray(client)[:: max(1, len(client) // 20_000)].tolist()))) >= _SEVERAL
    features = features_in(frame, columns, name)
    x = frames.inputs_of(frame, features, columns.plan, name, tokens=tokens, bad=bad, several=several)
    split = None if SPLIT in columns.features else frames.find_column(frame, SPLIT, name)
    times = frames.find_column(frame, columns.time, name) if columns.time and split is None else None
    time = None if times is None else order_of(times, columns.time, name)
    y = frames.labels_in(frame, columns.label, name, columns.class_names)
    return Rows(x, y, client, split, frames.why_no_labels(frame, columns.label) if y is None else "", time)


def names_of_owners(client: str, features: Sequence[str], *, named: bool = False) -> tuple[str, ...]:
    """Return the columns that may have the owners of samples: `client`, and `CLIENT` unless that is a feature.

    `named` means that the user gave the name `client`. Then no other column is possible.
    """
    return (client,) if named or CLIENT in (client, *features) else (client, CLIENT)


def find_owners(frame: Any, candidates: Sequence[str], features: Sequence[str], name: str) -> tuple[str, Array] | None:
    """Return the first of `candidates` that is a column of the table, and its values [N]; None if none is."""
    for candidate in candidates:
        if (values := frames.find_column(frame, candidate, name)) is not None:
            return candidate, values
    refuse_similar(candidates, [*frames.columns(frame), *filter(None, frames.index_levels(frame))], features, name)
    return None


def clients_in(frame: Any, candidates: Sequence[str], features: Sequence[str], name: str) -> tuple[str, set[Name]]:
    """Return the table's column of clients and the clients in it; "" and nobody without such a column."""
    owned = find_owners(frame, candidates, features, name)
    return ("", set()) if owned is None else (owned[0], clients_of(owned[1], owned[0], name))


def refuse_similar(candidates: Sequence[str], there: Sequence[str], features: Sequence[str], name: str) -> None:
    """Raise PefllError for a column such as `User_ID` if `user_id` is missing: ignoring it would merge all clients."""
    known = set(features)
    for candidate in candidates:
        if other := similar(candidate, (each for each in there if each not in known)):
            raise PefllError(
                f"{name} has {other!r}, which looks like the column of clients, {candidate!r}; rename it, or leave it "
                "out if all samples are one client's",
                code="PEFLL-M064",
            )


def clients_of(owners: Any, column: str, name: str) -> set[Name]:
    """Return the clients in a column of owners [N]; PefllError for missing entries."""
    empty = frames.without_owner(owners)
    if len(empty):
        raise PefllError(
            f"{name}: {len(empty):,} of {counted(len(owners), 'sample')} have no client in {column!r}, the first of "
            f"which is row {empty[0] + 1:,}; fill them in, or leave this column out if all samples are one client's",
            code="PEFLL-M061",
        )
    return set(map(_name_in, np.asarray(owners).reshape(-1).tolist()))


def _name_in(cell: Any) -> Name:
    """Return the client's name in a cell: client 3.0 is client 3, because a column with gaps elsewhere holds floats."""
    if isinstance(cell, float) and cell.is_integer():
        return int(cell)
    return cell if isinstance(cell, int | str) else str(cell)


def features_in(frame: Any, columns: Columns, name: str) -> Sequence[str]:
    """Return the names of the features: `columns.features`, or else all columns but labels, clients and split."""
    labels = frames.label_names(columns.label, frames.columns(frame))
    return columns.features or frames.feature_names(frame, (*labels, columns.client, SPLIT), name)


def no_clients(name: str, what: str) -> PefllError:
    """Return the error for data that does not name the client of each sample."""
    column = argument("client", option="--client-column")
    return PefllError(
        f"{name} has no {what} with the client of each sample; name another with {column}", code="PEFLL-M033"
    )


def rows_by_client(owner: Array, clients: int) -> Iterator[tuple[int, Array]]:
    """Yield each client's number and the ascending indices of its samples."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    yield from enumerate(np.split(order, ends[:-1]))


def _labels_at(y: Array | None, rows: Array) -> Array | None:
    """Return labels at `rows`, as integers if possible: if another client has no labels, the column holds floats."""
    if y is None:
        return None
    return without_gaps(y[rows]) if y.dtype.kind == "f" else y[rows]
