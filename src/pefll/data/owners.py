"""Samples of many new clients at once, each client's apart from the others': one client's fault is not the others'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.wording import argument, counted
from pefll.data import frames
from pefll.data.arrays import as_array, owners_of
from pefll.data.federation import Array

Name = int | str
# What a column, or an array, of clients is called when nobody says so.
CLIENT = "client"
# What stands for no value, as a text.
_EMPTY = ("None", "nan", "<NA>", "NaT")


class Owned(NamedTuple):
    """One client's samples, unchecked.

    Attributes:
        client: what the data calls it.
        x: [m, ...].
        y: [m], labels as the data has them; None where it has none.
    """

    client: Name
    x: Array
    y: Array | None


class Columns(NamedTuple):
    """Where a table has what.

    Attributes:
        features: the names of the columns of numbers, in order; empty for all that are nothing else.
        label: the name of the column of labels, which may be absent.
        client: the name of the column of clients.
    """

    features: Sequence[str]
    label: str
    client: str


def by_client(x: Any, y: Any, client: Any, name: str = "arrays") -> list[Owned]:
    """Return each client's samples, in the order of their names.

    Args:
        x: [N, ...].
        y: [N]; None where there are no labels.
        client: [N] whole numbers or texts.
        name: of the data, for errors.
    """
    x = as_array(x, "x", name)
    y = None if y is None else as_array(y, "y", name)
    if x.ndim == 0 or len(x) == 0:
        raise PefllError(f"{name}: there are no samples", code="PEFLL-D134")
    owner, names = owners_of(client, name)
    for what, array in (("client", owner), *((("y", y),) if y is not None else ())):
        if array.ndim != 1 or len(array) != len(x):
            raise PefllError(
                f"{name}: x has {counted(len(x), 'sample')} but {what} has the shape {list(array.shape)}; they must be "
                "equally many",
                code="PEFLL-M032",
            )
    return [Owned(names[number], x[rows], _whole(y, rows)) for number, rows in _rows(owner, len(names))]


def from_frame(
    frame: Any, columns: Columns, y: Any = None, name: str = "the table", *, tokens: bool = False
) -> list[Owned]:
    """Return each client's samples from a table with one row per sample.

    Args:
        frame: see `frames.from_frame`.
        columns: where it has what.
        y: [N] labels; None for those in the table.
        name: of the table, for errors.
        tokens: the features are tokens.
    """
    client = frames.find_column(frame, columns.client, name)
    if client is None:
        raise no_clients(name, f"column {columns.client!r}")
    if y is None and columns.label in frames.columns(frame):
        y = frames.column(frame, columns.label, name)
    x = frames.matrix_by_name(frame, features_in(frame, columns, name), name, tokens=tokens)
    return by_client(x, y, client, name)


def names_of_owners(client: str, features: Sequence[str], *, named: bool = False) -> tuple[str, ...]:
    """Return where one client's data may say whose it is: in the run's column, or else in the usual one.

    Args:
        client: the column of clients, or the array.
        features: what the model's features are called, if that is known; a feature says nothing about owners.
        named: the user named `client`, so that no other column is looked at.
    """
    return (client,) if named or CLIENT in (client, *features) else (client, CLIENT)


def number_of_clients(owners: Any, column: str, name: str) -> int:
    """Return how many clients a column names; PefllError where some of its entries are empty.

    Args:
        owners: [N] the column's values.
        column: what it is called.
        name: of the data, for errors.
    """
    values = np.asarray(owners).reshape(-1).tolist()
    empty = sum(not isinstance(value, str) and str(value) in _EMPTY for value in values)
    if empty:
        raise PefllError(
            f"{name}: {empty:,} of {counted(len(values), 'sample')} have no client in {column!r}; fill them in, or "
            "leave this column out if all samples are one client's",
            code="PEFLL-M061",
        )
    return len(set(values))


def features_in(frame: Any, columns: Columns, name: str) -> Sequence[str]:
    """Return the names of a table's columns of features; without names, all that are nothing else."""
    return columns.features or frames.feature_names(frame, (columns.label, columns.client, "split"), name)


def no_clients(name: str, what: str) -> PefllError:
    """Return the error for data that does not say whose each sample is."""
    column = argument("client", option="--client-column")
    return PefllError(
        f"{name} has no {what} that says whose each sample is; name another with {column}", code="PEFLL-M033"
    )


def _rows(owner: Array, clients: int) -> Iterator[tuple[int, Array]]:
    """Yield each client's number and the places of its samples, in their order."""
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    yield from enumerate(np.split(order, ends[:-1]))


def _whole(y: Array | None, rows: Array) -> Array | None:
    """Return some of the labels; a table that lacks one client's makes fractions of everybody's whole numbers."""
    if y is None:
        return None
    mine = y[rows]
    if mine.dtype.kind == "f" and np.isfinite(mine).all() and (mine == np.floor(mine)).all():
        return mine.astype(np.int64)
    return mine
