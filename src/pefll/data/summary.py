"""Statistics of a federation: samples, classes and clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pefll.core.wording import first_few
from pefll.data.federation import SPLITS, TRAIN, Array, Federation, Samples, check_is_federation

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
        classes: number of classes.
        class_names: one name per class, or empty.
        samples: triple of the number of samples of all clients.
        samples_per_client: triple of the spread of samples over clients.
        class_table: number of samples of each class, one triple per class.
        classes_per_client: spread of the number of classes among a client's training samples.
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


def summarise(federation: Federation) -> Summary:
    """Return the statistics of a federation; it is fast for a million clients."""
    check_is_federation(federation)
    n, classes = federation.num_clients, federation.classes
    labels = federation.y.cpu().numpy()
    count = federation.count.cpu().numpy()
    block = max(1, _CELLS // classes)
    table = np.zeros((classes, len(SPLITS)), dtype=np.int64)
    different = np.empty(n, dtype=np.int64)
    for first in range(0, n, block):
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
        class_names=federation.class_names,
        samples=tuple(count.sum(axis=1).tolist()),
        samples_per_client=tuple(_spread(each) for each in count),
        class_table=tuple(map(tuple, table.tolist())),
        classes_per_client=_spread(different),
    )


def classes_without_samples(samples: Samples) -> str:
    """Return which classes are empty, for example `"1, 2 and 4 have no sample"`; "" if none is empty."""
    absent = np.flatnonzero(np.bincount(samples.y, minlength=samples.classes) == 0).tolist()
    return f"{first_few(absent)} {'has' if len(absent) == 1 else 'have'} no sample" if absent else ""


def _spread(values: Array) -> Spread:
    return Spread(int(values.min()), float(np.median(values)), int(values.max()))
