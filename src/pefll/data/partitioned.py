"""Federations from data that others divided among clients: partitioners and torch's data sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from pefll.core.arguments import listed, shown, text, whole_number
from pefll.core.errors import PefllError, first_line
from pefll.core.plugins import fault
from pefll.core.wording import argument
from pefll.data.arrays import as_array, samples_from_arrays
from pefll.data.column_use import chosen_features, refuse_use, use_of
from pefll.data.federation import Federation
from pefll.data.frames import column, columns, is_frame, joined_names, label_column, label_names
from pefll.data.samples import Array
from pefll.data.table_samples import rows_where, rows_with_labels, samples_of_rows
from pefll.data.user_arrays import federation_of_clients


def federation_from_partitioner(
    partitioner: Any,
    label: str | Sequence[str] = "label",
    features: str | Sequence[str] | None = None,
    *,
    drop: Sequence[str] = (),
    treat: Mapping[str, str] | None = None,
    missing: str = "impute",
    encode: str = "auto",
    min_samples: int = 1,
    time: str | None = None,
    unseen: float = 0.1,
    unseen_clients: Sequence[int | str] = (),
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    name: str = "partitions",
    labels: str = "auto",
    tokens: bool = False,
) -> Federation:
    """Return a federation with a client for each partition of a partitioner, as those of `flwr-datasets` are.

    Columns are treated as by `federation_from_frame`, which explains the other arguments.

    Args:
        partitioner: has `num_partitions`, and `load_partition(i)`, which returns a table: a data set of Hugging Face, a
            data frame, or a dictionary of columns; or a dictionary with such a table for train, validation and test.
        label: name of the column of labels; or several names, as a list or with commas between them.
        features: names of the columns that are features; by default all others. One column alone may hold whole
            samples, such as images or lists of numbers of equal length.
        drop: names of columns that are not used, such as the one that the partitioner divides by.
        treat: rules for columns, by their names.
        missing: what happens to rows with missing values.
        encode: "auto", or "none" to use numbers as they are.
        min_samples: clients with fewer rows are left out.
        time: name of a column that orders each client's rows.
        unseen: fraction of clients that never take part in training.
        unseen_clients: numbers of the partitions that never take part in training; they replace `unseen`.
        validation: fraction of each client's training samples that become validation samples.
        test: fraction of each client's samples that become test samples, if partitions are not split.
        seed: seed of the random splits and of the order of clients.
        classes: number of classes; by default that of the data set, or the largest label + 1.
        name: name of the data.
        labels: what labels are, see `samples_from_arrays`; with auto, their type and shape tell.
        tokens: whether the column of whole samples holds whole numbers that a model embeds.
    """
    label = text(joined_names(label), "label", "label")
    dropped = _names(drop, "drop", "['user']")
    use = use_of(drop=dropped, treat=treat, encode=encode, time="" if time is None else time, missing=missing)
    tables, client, split = _tables(partitioner)
    special = label_names(label, columns(tables[0]))
    given = () if features is None else _names(features, "features", "['age', 'height']")
    chosen = chosen_features(tables[0], given, special, use, name)
    whole = {each: _whole(tables, each, name) for each in dict.fromkeys((*special, *chosen, *filter(None, [use.time])))}
    y = label_column(whole, label, name)
    class_names = _class_names(tables[0], label)
    classes = (len(class_names) or None) if classes is None else classes
    x = whole[chosen[0]] if len(chosen) == 1 else None
    if x is not None and x.ndim > 1:
        refuse_use(use._replace(features=(), drop=()), f"{name}: column {chosen[0]!r}")
        there = rows_with_labels(y, label, use, name)
        x, y, client, split = (rows_where(there, each) for each in (x, y, client, split))
        samples = samples_from_arrays(
            x, y, client, split, classes, name, tokens=tokens, labels=labels, label_names=special
        )
        row = None if there.all() else np.flatnonzero(there)
        samples = replace(samples, label_column=label, unlabelled=int((~there).sum()), row=row)
    else:
        if several := next((each for each in chosen if whole[each].ndim > 1), None):
            raise PefllError(
                f"{name}: column {several!r} cannot be used: it holds whole samples; take it alone, with "
                f"features={several!r}, or leave it out with drop",
                code="PEFLL-D006",
            )
        samples = samples_of_rows(
            whole, label, y, client, split, chosen, classes=classes, name=name, use=use, labels=labels
        )
    if class_names and samples.classes == len(class_names):
        samples = replace(samples, class_names=class_names)
    return federation_of_clients(
        samples,
        missing,
        min_samples,
        seed=seed,
        unseen=unseen,
        unseen_clients=unseen_clients,
        validation=validation,
        test=test,
    )


def _names(given: str | Sequence[str], what: str, example: str) -> tuple[str, ...]:
    """Return the names of columns in an argument."""
    names = [given] if isinstance(given, str) else listed(given, what, example)
    return tuple(text(each, what) for each in names)


def _asked(what: str, ask: Callable[[], Any]) -> Any:
    """Return what a partitioner answers; PefllError if its code fails."""
    try:
        return ask()
    except Exception as error:  # another's code may raise anything
        why = fault(error) or f"{type(error).__name__}: {first_line(error)}"
        raise PefllError(
            f"{what} of the partitioner failed: {why}; correct the partitioner, or assign its dataset first",
            code="PEFLL-A586",
        ) from error


def _tables(partitioner: Any) -> tuple[list[Any], Array, Array | None]:
    """Return all tables of a partitioner, the partition of each row, int64 [N], and its split [N], if there is one."""
    load = getattr(partitioner, "load_partition", None)
    # A property may raise AttributeError, as in flwr-datasets before a data set is assigned.
    there = any(hasattr(each, "num_partitions") for each in (partitioner, type(partitioner)))
    if isinstance(partitioner, type) or not callable(load) or not there:
        raise PefllError(
            f"the partitioner is {shown(partitioner)}; it must have num_partitions and load_partition(i)", "PEFLL-A581"
        )
    number = _asked("num_partitions", lambda: partitioner.num_partitions)
    tables, client, split = [], [], []
    for place in range(whole_number(number, "num_partitions", 1)):
        given = _asked(f"load_partition({place})", partial(load, place))
        parts = given if isinstance(given, dict) and given and all(map(is_frame, given.values())) else {"": given}
        for part, table in parts.items():
            if not is_frame(table):
                raise PefllError(
                    f"partition {place} is {shown(table)}; load_partition must return a table with named columns",
                    code="PEFLL-A582",
                )
            names = columns(table)
            rows = len(table[names[0]]) if names else 0
            tables.append(table)
            client.append(np.full(rows, place))
            split.append(np.full(rows, str(part), dtype=object))
    splits = np.concatenate(split)
    return tables, np.concatenate(client), None if (splits == "").all() else splits


def _class_names(table: Any, label: str) -> tuple[str, ...]:
    """Return the names of classes that a data set of Hugging Face has for a column; () for other tables."""
    about = getattr(table, "features", None)
    return tuple(getattr(about.get(label), "names", None) or ()) if isinstance(about, Mapping) else ()


def _whole(tables: Sequence[Any], name: str, where: str) -> Array:
    """Return a column of all partitions, one after the other, [N, ...]."""
    parts = [_values(table, name, where) for table in tables]
    if any(part.dtype == object for part in parts):
        parts = [part.astype(object) for part in parts]  # texts with missing values
    try:
        return np.concatenate(parts)
    except ValueError as error:
        raise PefllError(
            f"{where}: column {name!r} differs in shape between partitions: {first_line(error)}; make it equal",
            code="PEFLL-D612",
        ) from None


def _values(table: Any, name: str, where: str) -> Array:
    """Return a column of a table, [N], or [N, ...] if each cell holds a whole sample, such as an image."""
    first = next(iter(table[name]), None) if name in columns(table) else None
    if first is None or isinstance(first, str | bytes | dict) or np.ndim(np.asarray(first)) == 0:
        return column(table, name, where)
    return as_array([np.asarray(each) for each in table[name]], f"column {name!r}", where)


def federation_from_dataset(
    dataset: Any,
    client: Any = None,
    *,
    split: Any = None,
    min_samples: int = 1,
    time: Any = None,
    unseen: float = 0.1,
    unseen_clients: Sequence[int | str] = (),
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    name: str = "dataset",
    labels: str = "auto",
    tokens: bool = False,
) -> Federation:
    """Return a federation from a `torch.utils.data.Dataset` with a length.

    Args:
        dataset: item i is (x, y), or (x, y, client).
        client: [N] the owner of each item: any whole numbers or texts; None if the items say so.
        split: [N] train, validation, test (or 0, 1, 2); None to split each client's items at random.
        min_samples: clients with fewer items are left out.
        time: [N] dates or numbers: each client's last items become its test samples.
        unseen: fraction of clients that never take part in training.
        unseen_clients: the clients that never take part in training, by name; they replace `unseen`.
        validation: fraction of each client's training samples that become validation samples.
        test: fraction of each client's samples that become test samples.
        seed: seed of the random splits and of the order of clients.
        classes: number of classes; by default the largest label + 1.
        name: name of the data.
        labels: what labels are, see `samples_from_arrays`; with auto, their type and shape tell.
        tokens: whether x holds whole numbers that a model embeds.
    """
    try:
        total = len(dataset) if hasattr(dataset, "__getitem__") else -1
    except TypeError:
        total = -1
    if total < 0:
        raise PefllError(
            f"the dataset is {shown(dataset)}; it must have a length, and dataset[i] must be (x, y)", code="PEFLL-A583"
        )
    width = 2 if client is not None else 3
    parts: tuple[list[Any], ...] = ([], [], [])
    for place in range(total):
        try:
            item = dataset[place]
        except Exception as error:  # a user's code may raise anything
            if isinstance(error, KeyError | TypeError | IndexError) and not isinstance(
                dataset, torch.utils.data.Dataset
            ):
                raise PefllError(
                    f"{name}: the dataset is {shown(dataset)}, and has no item {place}; dataset[i] must be (x, y)",
                    code="PEFLL-A585",
                ) from error
            why = fault(error) or f"{type(error).__name__}: {first_line(error)}"
            raise PefllError(
                f"{name}: item {place} of the dataset failed: {why}; correct the dataset, or leave the item out with "
                "torch.utils.data.Subset",
                code="PEFLL-D660",
            ) from error
        if not isinstance(item, tuple | list) or len(item) < width:
            need = "(x, y, client), or (x, y) beside " + argument("client") if width == 3 else "(x, y)"
            raise PefllError(f"{name}: item {place} is {shown(item)}; it must be {need}", code="PEFLL-D613")
        for part, value in zip(parts, item, strict=False):
            part.append(value)
    x, y = _array(parts[0], "x", name), _array(parts[1], "y", name)
    owner = client if client is not None else _array(parts[2], "client", name)
    samples = samples_from_arrays(x, y, owner, split, classes, name, tokens=tokens, labels=labels, time=time)
    return federation_of_clients(
        samples,
        min_samples=min_samples,
        seed=seed,
        unseen=unseen,
        unseen_clients=unseen_clients,
        validation=validation,
        test=test,
    )


def _array(values: list[Any], what: str, name: str) -> Array:
    """Return the values of all items as one array."""
    return as_array([np.asarray(value) if hasattr(value, "__array__") else value for value in values], what, name)
