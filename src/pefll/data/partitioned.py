"""Federations from data that others divided among clients: partitioners and torch's data sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pefll.core.arguments import listed, shown, text, whole_number
from pefll.core.errors import PefllError, first_line
from pefll.core.wording import argument
from pefll.data.arrays import as_array, samples_from_arrays
from pefll.data.federation import Federation
from pefll.data.frames import column, columns, is_frame
from pefll.data.normalise import with_channel_stats
from pefll.data.partition import natural
from pefll.data.samples import Array
from pefll.data.table_samples import samples_of_columns


def federation_from_partitioner(
    partitioner: Any,
    label: str = "label",
    features: str | Sequence[str] | None = None,
    *,
    unseen: float = 0.1,
    unseen_clients: Sequence[int | str] = (),
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    name: str = "partitions",
) -> Federation:
    """Return a federation with a client for each partition of a partitioner, as those of `flwr-datasets` are.

    Args:
        partitioner: has `num_partitions`, and `load_partition(i)`, which returns a table: a data set of Hugging Face, a
            data frame, or a dictionary of columns.
        label: name of the column of labels.
        features: name of the column that holds a whole sample, such as "img"; or names of columns of numbers or
            categories; by default all others.
        unseen: fraction of clients that never take part in training.
        unseen_clients: numbers of the partitions that never take part in training; they replace `unseen`.
        validation: fraction of each client's training samples that become validation samples.
        test: fraction of each client's samples that become test samples.
        seed: seed of the random splits and of the order of clients.
        name: name of the data.
    """
    load, number = getattr(partitioner, "load_partition", None), getattr(partitioner, "num_partitions", None)
    if not callable(load) or number is None:
        raise PefllError(
            f"the partitioner is {shown(partitioner)}; it must have num_partitions and load_partition(i)", "PEFLL-A581"
        )
    label = text(label, "label", "label")
    tables = [load(place) for place in range(whole_number(number, "num_partitions", 1))]
    for place, table in enumerate(tables):
        if not is_frame(table):
            raise PefllError(
                f"partition {place} is {shown(table)}; load_partition must return a table with named columns",
                code="PEFLL-A582",
            )
    wanted = [each for each in _features(tables[0], features) if each != label]
    whole = {each: _whole(tables, each, name) for each in wanted}
    y = _whole(tables, label, name)
    client = np.repeat(np.arange(len(tables)), [len(table[label]) for table in tables])
    x = next(iter(whole.values())) if len(whole) == 1 else None
    if x is not None and x.ndim > 1:
        samples = samples_from_arrays(x, y, client, name=name)
    else:
        samples = samples_of_columns(whole, tuple(whole), {}, y, client, name=name)
    return with_channel_stats(
        natural(samples, seed, unseen=unseen, validation=validation, test=test, unseen_clients=unseen_clients)
    )


def _features(table: Any, features: str | Sequence[str] | None) -> list[str]:
    if features is None:
        return columns(table)
    names = [features] if isinstance(features, str) else listed(features, "features", "['age', 'height']")
    return [text(each, "a feature") for each in names]


def _whole(tables: Sequence[Any], name: str, where: str) -> Array:
    """Return a column of all partitions, one after the other, [N, ...]."""
    parts = [_values(table, name, f"partition {place}") for place, table in enumerate(tables)]
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
    unseen: float = 0.1,
    unseen_clients: Sequence[int | str] = (),
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    name: str = "dataset",
    tokens: bool = False,
) -> Federation:
    """Return a federation from a `torch.utils.data.Dataset` with a length.

    Args:
        dataset: item i is (x, y), or (x, y, client).
        client: [N] the owner of each item: any whole numbers or texts; None if the items say so.
        unseen: fraction of clients that never take part in training.
        unseen_clients: the clients that never take part in training, by name; they replace `unseen`.
        validation: fraction of each client's training samples that become validation samples.
        test: fraction of each client's samples that become test samples.
        seed: seed of the random splits and of the order of clients.
        classes: number of classes; by default the largest label + 1.
        name: name of the data.
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
        except (KeyError, TypeError, IndexError) as error:
            raise PefllError(
                f"{name}: the dataset is {shown(dataset)}, and has no item {place}; dataset[i] must be (x, y)",
                code="PEFLL-A585",
            ) from error
        if not isinstance(item, tuple | list) or len(item) < width:
            need = "(x, y, client), or (x, y) beside " + argument("client") if width == 3 else "(x, y)"
            raise PefllError(f"{name}: item {place} is {shown(item)}; it must be {need}", code="PEFLL-D613")
        for part, value in zip(parts, item, strict=False):
            part.append(value)
    x, y = _array(parts[0], "x", name), _array(parts[1], "y", name)
    owner = client if client is not None else _array(parts[2], "client", name)
    samples = samples_from_arrays(x, y, owner, None, classes, name, tokens=tokens)
    return with_channel_stats(
        natural(samples, seed, unseen=unseen, validation=validation, test=test, unseen_clients=unseen_clients)
    )


def _array(values: list[Any], what: str, name: str) -> Array:
    """Return the values of all items as one array."""
    return as_array([np.asarray(value) if hasattr(value, "__array__") else value for value in values], what, name)
