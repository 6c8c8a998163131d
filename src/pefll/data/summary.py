"""Statistics of a federation: samples, labels and clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pefll.core.wording import first_few
from pefll.data.federation import Federation, check_is_federation
from pefll.data.samples import SPLITS, TRAIN, Array, Samples

# Clients are processed in blocks. A block's table of clients and classes has about this many cells.
_CELLS = 1 << 22


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum over clients."""

    least: int
    median: float
    most: int


@dataclass(frozen=True)
class Summary:
    """Statistics of a federation. Triples have one entry each for train, validation and test.

    Attributes:
        name: name of the data set.
        partition: the partition in words.
        num_clients: number of all clients.
        num_seen: number of clients that take part in training.
        num_unseen: number of clients that never take part in training.
        num_untested: number of clients without a test sample.
        classes: number of classes; 0 if labels are numbers or sets.
        class_names: one name per class, or empty; for numbers and sets, one name per column of y, or empty.
        samples: triple of the number of samples of all clients.
        samples_per_client: triple of the spread of samples over clients.
        class_table: number of samples of each class, one triple per class; for sets, with each member.
        classes_per_client: spread of the number of classes among a client's training samples; zeros without classes.
        ranges: smallest, mean and largest training label of each column of numbers, or empty.
        client_means: smallest, median and largest mean of a client's training labels of each column, or empty.
    """

    name: str
    partition: str
    num_clients: int
    num_seen: int
    num_unseen: int
    num_untested: int
    classes: int
    class_names: tuple[str, ...]
    samples: tuple[int, ...]
    samples_per_client: tuple[Spread, ...]
    class_table: tuple[tuple[int, ...], ...]
    classes_per_client: Spread
    ranges: tuple[tuple[float, float, float], ...] = ()
    client_means: tuple[tuple[float, float, float], ...] = ()


def summarise(federation: Federation) -> Summary:
    """Return the statistics of a federation; it is fast for a million clients."""
    check_is_federation(federation)
    n, classes, kind = federation.num_clients, federation.classes, federation.labels
    labels = federation.y.cpu().numpy()
    count = federation.count.cpu().numpy()
    block = max(1, _CELLS // max(1, classes))
    table = np.zeros((labels.shape[1] if kind == "sets" else classes, len(SPLITS)), dtype=np.int64)
    different = np.zeros(n, dtype=np.int64)
    for split in range(len(SPLITS)) if kind == "sets" else ():
        table[:, split] = labels[federation.rows_of_clients(split)].sum(axis=0)
    for first in range(0, n, block) if kind == "classes" else ():
        last = min(first + block, n)
        for split in range(len(SPLITS)):
            mine = labels[federation.rows_of_clients(split, first, last)]
            table[:, split] += np.bincount(mine, minlength=classes)
            if split == TRAIN:
                owner = np.repeat(np.arange(last - first), count[TRAIN, first:last])
                has_class = np.zeros((last - first, classes), dtype=bool)
                has_class[owner, mine] = True
                different[first:last] = has_class.sum(axis=1)
    return Summary(
        name=federation.name,
        partition=federation.partition,
        num_clients=n,
        num_seen=federation.num_seen,
        num_unseen=federation.num_unseen,
        num_untested=federation.num_untested,
        classes=classes,
        class_names=label_names(federation),
        samples=tuple(count.sum(axis=1).tolist()),
        samples_per_client=tuple(_spread(each) for each in count),
        class_table=tuple(map(tuple, table.tolist())),
        classes_per_client=_spread(different),
        ranges=_ranges(labels[federation.rows_of_clients(TRAIN)]) if kind == "numbers" else (),
        client_means=_spreads(client_means(federation)) if kind == "numbers" else (),
    )


def _ranges(numbers: Array) -> tuple[tuple[float, float, float], ...]:
    """Return minimum, mean and maximum of each column of numbers [m] or [m, k]."""
    columns = numbers.reshape(len(numbers), -1).astype(np.float64)
    return tuple(zip(*(part.tolist() for part in (columns.min(0), columns.mean(0), columns.max(0))), strict=True))


def _spreads(means: Array) -> tuple[tuple[float, float, float], ...]:
    """Return minimum, median and maximum of each column [n, k]."""
    return tuple((float(each.min()), float(np.median(each)), float(each.max())) for each in means.T)


def label_names(federation: Federation) -> tuple[str, ...]:
    """Return the names of classes, of members of sets, or of columns of numbers; empty without names."""
    one_column = federation.labels == "numbers" and federation.y[:1].numel() == 1
    if not federation.class_names and one_column and federation.label_column:
        return (federation.label_column,)
    return federation.class_names


def client_means(federation: Federation, split: int = TRAIN) -> Array:
    """Return the mean of each client's labels in a split, for each column of numbers, float64 [n, k].

    A client without samples in the split has NaN.
    """
    rows, count = federation.rows_of_clients(split), federation.count[split].cpu().numpy()
    numbers = federation.y.cpu().numpy()[rows].reshape(len(rows), -1).astype(np.float64)
    owner = np.repeat(np.arange(len(count)), count)
    sums = [np.bincount(owner, weights=column, minlength=len(count)) for column in numbers.T]
    return np.stack(sums, axis=1) / np.where(count > 0, count, np.nan)[:, None]


def classes_without_samples(samples: Samples) -> str:
    """Return which classes are empty, for example `"1, 2 and 4 have no sample"`; "" if none is empty."""
    if samples.labels != "classes":
        return ""
    absent = np.flatnonzero(np.bincount(samples.y, minlength=samples.classes) == 0).tolist()
    return f"{first_few(absent)} {'has' if len(absent) == 1 else 'have'} no sample" if absent else ""


def _spread(values: Array) -> Spread:
    return Spread(int(values.min()), float(np.median(values)), int(values.max()))
