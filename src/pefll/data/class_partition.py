"""Partitions by class: a number of classes for each client, or Dirichlet proportions."""

from __future__ import annotations

import math

import numpy as np

from pefll.core.arguments import number as any_number
from pefll.core.arguments import share, whole_number
from pefll.core.errors import PefllError
from pefll.core.randomness import generator
from pefll.core.wording import counted
from pefll.data.assembly import assemble
from pefll.data.federation import Federation
from pefll.data.samples import SPLITS, TEST, TRAIN, VALIDATION, Array, Samples, check_is_samples
from pefll.data.seen_clients import number_of_seen

_FEW = 10_000  # this many clients always fit into memory; later checks explain a lack of samples better


def by_class(
    samples: Samples,
    clients: int,
    classes_per_client: int,
    seed: int = 0,
    unseen: float = 0.1,
    validation: float = 0.2,
    test: float = 0.2,
) -> Federation:
    """Return a federation whose clients have a few classes each, as in the paper; each sample has one owner.

    All classes have equal numbers of clients, up to one. One client after the other draws its classes at random
    among those that lack most clients. In each split, the clients of a class get equal numbers of samples, up to one.

    Args:
        samples: samples to give to clients.
        clients: number of clients.
        classes_per_client: number of classes of each client.
        seed: seed of all random draws.
        unseen: fraction of clients that never take part in training; these are the last clients.
        validation: fraction of each class's training samples that become validation samples.
        test: fraction of each class's samples that become test samples, if the data is not split.
    """
    check_is_samples(samples)
    _check_classes(samples, "by-class")
    clients, seed = whole_number(clients, "clients", 1), whole_number(seed, "seed", 0)
    classes_per_client = whole_number(classes_per_client, "classes_per_client")
    num_seen = number_of_seen(clients, unseen)
    if not 1 <= classes_per_client <= samples.classes:
        raise PefllError(
            f"by-class {classes_per_client}: a client can have 1..{samples.classes} of the {samples.classes} classes",
            code="PEFLL-D185",
        )
    _check_enough(samples, clients)
    split = _cut_by_class(samples, seed, validation, test)
    random = generator(seed, "partition/by-class")
    has_class = _draw_classes(clients, classes_per_client, samples.classes, random)
    owner = np.full(len(samples.y), -1, dtype=np.int64)
    for which in (TRAIN, VALIDATION, TEST):
        by_label = _rows_by_class(samples, split, which, random)
        for label, members in enumerate(by_label):
            holders = random.permutation(np.flatnonzero(has_class[:, label]))
            # A client may lack validation samples of a class, because these only choose the best round.
            if len(members) < len(holders) and which != VALIDATION:
                raise PefllError(
                    f"{samples.name}: class {label} has {counted(len(members), f'{SPLITS[which]} sample')} for "
                    f"{counted(len(holders), 'client')}; make fewer clients, or give each fewer classes",
                    code="PEFLL-D186",
                )
            if len(holders):
                owner[members] = np.repeat(holders, _shares(len(members), len(holders)))
    return assemble(samples, owner, split, num_seen, f"by-class {classes_per_client}")


def dirichlet(
    samples: Samples,
    clients: int,
    alpha: float,
    seed: int = 0,
    alpha_unseen: float | None = None,
    unseen: float = 0.1,
    validation: float = 0.2,
    test: float = 0.2,
) -> Federation:
    """Return a federation of clients with equal numbers of samples and Dirichlet-distributed class proportions.

    A client's proportions are the same in all splits; its numbers of samples per class are multinomial. Samples of a
    class and split are drawn without replacement. When none is left, all are drawn again. So a sample may be drawn
    several times, but never in two splits.

    Args:
        samples: samples to give to clients.
        clients: number of clients.
        alpha: concentration of the distribution, equal for all classes; small values give uneven proportions.
        seed: seed of all random draws.
        alpha_unseen: concentration for unseen clients; by default `alpha`.
        unseen: fraction of clients that never take part in training; these are the last clients.
        validation: fraction of each class's training samples that become validation samples.
        test: fraction of each class's samples that become test samples, if the data is not split.
    """
    check_is_samples(samples)
    _check_classes(samples, "dirichlet")
    clients, seed = whole_number(clients, "clients", 1), whole_number(seed, "seed", 0)
    num_seen = number_of_seen(clients, unseen)
    alpha = any_number(alpha, "alpha")
    other = alpha if alpha_unseen is None else any_number(alpha_unseen, "alpha_unseen")
    for value in (alpha, other):
        if value <= 0:
            raise PefllError(f"dirichlet: the concentration is {value}; it must be a number above 0", code="PEFLL-D187")
    _check_enough(samples, clients)
    split = _cut_by_class(samples, seed, validation, test)
    random = generator(seed, "partition/dirichlet")
    sizes = ((alpha, num_seen), (other, clients - num_seen))
    proportions = np.concatenate([random.dirichlet(value * np.ones(samples.classes), size=n) for value, n in sizes])
    owners, rows, splits = [], [], []
    for which in (TRAIN, VALIDATION, TEST):
        by_label = _rows_by_class(samples, split, which, random)
        there = sum(len(members) for members in by_label)
        each = there // clients
        if each == 0 and which != VALIDATION:
            raise PefllError(
                f"{samples.name}: {counted(there, f'{SPLITS[which]} sample')} {'is' if there == 1 else 'are'} too few "
                f"for {counted(clients, 'client')}; make fewer clients",
                code="PEFLL-D188",
            )
        counts = random.multinomial(each, proportions)
        for label, members in enumerate(by_label):
            needed = int(counts[:, label].sum())
            if needed and not len(members):
                raise PefllError(
                    f"{samples.name}: class {label} has no {SPLITS[which]} samples; add some, or make fewer classes",
                    code="PEFLL-D189",
                )
            if needed:
                shuffles = np.tile(members, (-(-needed // len(members)), 1))
                rows.append(random.permuted(shuffles, axis=1).reshape(-1)[:needed])
                owners.append(np.repeat(np.arange(clients), counts[:, label]))
                splits.append(np.full(needed, which, dtype=np.int8))
    words = f"dirichlet {alpha:g}" + ("" if alpha_unseen is None else f"/{alpha_unseen:g}")
    return assemble(samples, np.concatenate(owners), np.concatenate(splits), num_seen, words, rows=np.concatenate(rows))


def _check_classes(samples: Samples, partition: str) -> None:
    """Raise PefllError if a partition by class gets labels without classes."""
    if samples.labels != "classes":
        raise PefllError(
            f"{samples.name}: the partition {partition!r} needs classes, but these labels are {samples.labels}; name "
            "the client of each sample, for the partition 'natural'",
            code="PEFLL-D507",
        )


def _check_enough(samples: Samples, clients: int) -> None:
    """Raise PefllError for more clients than samples, before their tables fill the memory."""
    total = len(samples.y)
    if clients > max(total, _FEW):
        raise PefllError(
            f"{samples.name}: {counted(total, 'sample')} {'is' if total == 1 else 'are'} too few for "
            f"{counted(clients, 'client')}; make fewer clients",
            code="PEFLL-L001",
        )


def _cut_by_class(samples: Samples, seed: int, validation: float, test: float) -> Array:
    """Return the split of each sample, int8 [N]. Splits that the data lacks are drawn from each class's samples."""
    validation, test = share(validation, "validation"), share(test, "test")
    random = generator(seed, "partition/cut")
    split = np.zeros(len(samples.y), dtype=np.int8) if samples.split is None else samples.split.astype(np.int8)
    cuts = [(TEST, test)] if samples.split is None else []
    if not (split == VALIDATION).any():
        cuts.append((VALIDATION, validation))
    for which, fraction in cuts:
        for members in _rows_by_class(samples, split, TRAIN, random):
            split[members[: math.floor(fraction * len(members) + 0.5)]] = which
    return split


def _rows_by_class(samples: Samples, split: Array, which: int, random: np.random.Generator) -> list[Array]:
    """Return the indices of each class's samples in one split, in random order."""
    rows = random.permutation(np.flatnonzero(split == which))
    labels = samples.y[rows]
    ends = np.cumsum(np.bincount(labels, minlength=samples.classes))
    return np.split(rows[np.argsort(labels, kind="stable")], ends[:-1])


def _draw_classes(clients: int, each: int, classes: int, random: np.random.Generator) -> Array:
    """Return which classes each client has, bool [clients, classes]. Classes get equally many clients, up to one."""
    left = np.full(classes, clients * each // classes)
    left[random.permutation(classes)[: clients * each % classes]] += 1
    has_class = np.zeros((clients, classes), dtype=bool)
    for client in range(clients):
        # Take the classes that lack most clients, ties at random. So these numbers never differ by more than one.
        drawn = np.lexsort((random.random(classes), -left))[:each]
        has_class[client, drawn] = True
        left[drawn] -= 1
    return has_class


def _shares(total: int, holders: int) -> Array:
    """Return `holders` shares of `total` that differ by at most one, int64 [holders]."""
    return total // holders + (np.arange(holders) < total % holders)
