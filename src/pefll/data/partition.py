"""Partitions of samples among clients: by class, by Dirichlet proportions, or natural."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pefll.core.arguments import listed, plain, share, shown, whole_number
from pefll.core.arguments import number as any_number
from pefll.core.errors import PefllError
from pefll.core.randomness import generator
from pefll.core.wording import argument, counted, first_few
from pefll.data.assembly import assemble
from pefll.data.federation import Federation
from pefll.data.samples import SPLITS, TEST, TRAIN, VALIDATION, Array, Samples

UNSEEN = 0.1  # the default share of unseen clients
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
    num_seen = _num_seen(clients, unseen)
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
    num_seen = _num_seen(clients, unseen)
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


def natural(
    samples: Samples,
    seed: int = 0,
    unseen: float = 0.1,
    validation: float = 0.1,
    test: float = 0.2,
    clients: int | None = None,
    unseen_clients: Sequence[int | str] = (),
) -> Federation:
    """Return a federation of the clients that the data names.

    Clients are in random order. The last ones are unseen, so they are a random choice. Splits of the data are kept. If
    validation or test is missing, it is drawn from each client's training samples, of which at least one remains. If
    samples have a time, the last ones are drawn, not random ones.

    Args:
        samples: samples that have `client`.
        seed: seed of all random draws.
        unseen: fraction of clients that never take part in training.
        validation: fraction of each client's training samples that become validation samples.
        test: fraction of each client's samples that become test samples, if the data is not split.
        clients: number of clients to take, chosen at random; by default all.
        unseen_clients: the clients that never take part in training, by their names in the data; they replace `unseen`.
    """
    check_is_samples(samples)
    seed = whole_number(seed, "seed", 0)
    clients = None if clients is None else whole_number(clients, "clients", 1)
    if samples.client is None:
        raise PefllError(
            f"{samples.name} has no natural clients; partition it with 'by-class K' or 'dirichlet A'", code="PEFLL-D190"
        )
    validation, test = share(validation, "validation"), share(test, "test")
    random = generator(seed, "partition/natural")
    number = _number_clients(samples, samples.client, clients, random)
    total = int(number.max()) + 1
    if named := names_of_clients(unseen_clients):
        if share(unseen, "unseen") != UNSEEN:
            raise PefllError(
                f"{argument('unseen', unseen)} has no effect, because {argument('unseen_clients')} names the unseen "
                "clients; leave one of them out",
                code="PEFLL-D642",
            )
        number, num_seen = _named_last(samples, number, named)
    else:
        num_seen = _num_seen(total, unseen)

    rows = np.flatnonzero(number[samples.client] >= 0) if int(number.min()) < 0 else None
    owner = number[samples.client if rows is None else samples.client[rows]]
    kind = None if samples.split is None else (samples.split if rows is None else samples.split[rows])
    # One sort by client, split and 32 random bits. A stable sort orders ties the same in every version of NumPy.
    key = owner.astype(np.uint64)
    del owner
    key *= np.uint64(3)
    if kind is not None:
        key += kind.astype(np.uint8)
    count = np.bincount(key.view(np.int64), minlength=3 * total).reshape(total, 3)
    key <<= np.uint64(32)
    # These draws are made for samples with a time, too, so that a time does not change other random numbers.
    bits = random.integers(0, 1 << 32, size=len(key), dtype=np.uint32)
    key |= bits if samples.time is None else _ranks(samples, rows)
    order = np.argsort(key, kind="stable")
    del key
    _check_training(count, samples, number)
    _cut_counts(count, samples, validation, test)
    # A client's samples are in random order: the first become train, the next validation, the last test.
    owner = np.repeat(np.arange(total, dtype=np.int32), count.sum(axis=1))
    split = np.repeat(np.tile(np.arange(3, dtype=np.int8), total), count.reshape(-1))
    made = assemble(samples, owner, split, num_seen, "natural", rows=order if rows is None else rows[order])
    made = replace(made, named_unseen=bool(named), tests_last=samples.time is not None)
    who = np.empty(total, dtype=np.int64)  # the natural client that has each new number
    chosen = np.flatnonzero(number >= 0)
    who[number[chosen]] = chosen
    if samples.client_names:
        return replace(made, names=tuple(samples.client_names[client] for client in who.tolist()))
    return replace(made, keys=who if samples.client_keys is None else samples.client_keys[who])


def by_indices(
    samples: Samples,
    clients: Sequence[Any] | Mapping[int | str, Any],
    seed: int = 0,
    unseen: float = 0.1,
    unseen_clients: Sequence[int | str] = (),
    validation: float = 0.1,
    test: float = 0.2,
) -> Federation:
    """Return a federation in which each client has the samples of its own list of indices.

    Args:
        samples: the samples that the indices count.
        clients: for each client an array of indices, or a dictionary with indices for "train", and maybe for
            "validation" and "test". A list numbers the clients, a dictionary names them. No sample may be there twice.
        seed: seed of all random draws.
        unseen: fraction of clients, chosen at random, that never take part in training.
        unseen_clients: the clients that never take part in training, by name or number; they replace `unseen`.
        validation: see `natural`; for clients without "validation".
        test: see `natural`; used if no client names splits.
    """
    check_is_samples(samples)
    if isinstance(clients, Mapping):
        names, members = [str(name) for name in clients], list(clients.values())
    else:
        names, members = [], listed(clients, "clients", "[[0, 1], [2, 3]]")
    owner = np.full(len(samples.y), -1, dtype=np.int64)
    split = np.zeros(len(samples.y), dtype=np.int8)
    has_splits = any(isinstance(each, Mapping) for each in members)
    for number, each in enumerate(members):
        name = names[number] if names else str(number)
        for word, indices in (each if isinstance(each, Mapping) else {"train": each}).items():
            if word not in SPLITS:
                raise PefllError(
                    f"client {name} has indices for {shown(word)}; splits are {', '.join(SPLITS)}", code="PEFLL-D607"
                )
            rows = _indices(indices, name, len(owner))
            if (taken := owner[rows] >= 0).any() or len(np.unique(rows)) < len(rows):
                twice = rows[taken][0] if taken.any() else np.flatnonzero(np.bincount(rows) > 1)[0]
                first = int(owner[twice]) if taken.any() else number
                where = "twice" if first == number else f"also among those of client {names[first] if names else first}"
                raise PefllError(
                    f"{samples.name}: the index {int(twice)} of client {name} is there {where}; give each sample to "
                    "one client and one split",
                    code="PEFLL-D608",
                )
            owner[rows], split[rows] = number, SPLITS.index(word)
    if not len(members):
        raise PefllError(f"{samples.name}: there are no indices; give a list for each client", code="PEFLL-D676")
    used = np.flatnonzero(owner >= 0)
    empty = np.flatnonzero(np.bincount(owner[used], minlength=len(members)) == 0)
    if len(empty):
        who = names[empty[0]] if names else str(empty[0])
        raise PefllError(f"{samples.name}: client {who} has no indices; leave it out, or give it some", "PEFLL-D609")
    arrays = {name: getattr(samples, name)[used] for name in ("x", "y")}
    time = samples.time if samples.time is None else samples.time[used]
    own = replace(
        samples,
        **arrays,
        time=time,
        client=owner[used],
        client_names=tuple(names),
        client_keys=None,
        split=split[used] if has_splits else None,
    )
    made = natural(own, seed, unseen, validation, test, unseen_clients=unseen_clients)
    return replace(made, partition="by indices")


def _indices(indices: Any, client: str, total: int) -> Array:
    """Return a client's indices as int64 [n]; PefllError for values that are no indices of samples."""
    try:
        rows = np.asarray(indices)
    except ValueError:
        rows = np.empty((0, 0))
    if rows.size == 0 and rows.ndim == 1:
        return np.empty(0, dtype=np.int64)
    if rows.dtype.kind == "b":
        raise PefllError(
            f"the indices of client {client} are a boolean mask; give the places where it is True, with "
            "np.flatnonzero(mask)",
            code="PEFLL-D643",
        )
    if rows.ndim != 1 or rows.dtype.kind not in "ui":
        raise PefllError(
            f"the indices of client {client} are {shown(indices)}; give whole numbers, for example [0, 5, 7]",
            code="PEFLL-D610",
        )
    if int(rows.min()) < 0 or int(rows.max()) >= total:
        beyond = int(rows.max()) if int(rows.max()) >= total else int(rows.min())
        raise PefllError(
            f"client {client} has the index {beyond:,}, but there are {counted(total, 'sample')}, 0 to {total - 1:,}; "
            "correct it",
            code="PEFLL-D611",
        )
    return rows.astype(np.int64)


def _ranks(samples: Samples, rows: Array | None) -> Array:
    """Return the rank of each sample's time, uint32 [N]; equal times have equal ranks."""
    assert samples.time is not None
    if samples.split is not None:
        raise PefllError(
            f"{samples.name} has splits and also a column of times; leave one of them out", code="PEFLL-D603"
        )
    time = samples.time if rows is None else samples.time[rows]
    ranks: Array = np.unique(time, return_inverse=True)[1].reshape(-1).astype(np.uint32)
    return ranks


def names_of_clients(given: Sequence[int | str]) -> list[str]:
    """Return the names of a user's list of clients."""
    names = [plain(each) for each in listed(given, argument("unseen_clients"), "['ann', 'bob']")]
    for each in names:
        if isinstance(each, bool) or not isinstance(each, int | str):
            raise PefllError(
                f"{argument('unseen_clients')} has {shown(each)}; name clients by texts or whole numbers",
                code="PEFLL-A584",
            )
    return [str(each) for each in names]


def _named_last(samples: Samples, number: Array, names: Sequence[str]) -> tuple[Array, int]:
    """Return the clients' numbers with the named clients last, and the number of the others."""
    there = {samples.name_of(client): client for client in np.flatnonzero(number >= 0).tolist()}
    strange = [name for name in dict.fromkeys(names) if name not in there]
    if strange:
        empty = {samples.name_of(client) for client in np.flatnonzero(number < 0).tolist()}
        where = " among the rows that are left" if samples.unlabelled or empty.intersection(strange) else ""
        raise PefllError(
            f"{samples.name}: there is no client {first_few(map(repr, strange))}{where}; there are {first_few(there)}: "
            f"correct {argument('unseen_clients')}",
            code="PEFLL-D604",
        )
    named = np.zeros(len(number), dtype=bool)
    named[[there[name] for name in names]] = True
    # The order of the numbers is kept within the seen clients and within the unseen ones.
    chosen = np.flatnonzero(number >= 0)
    order = chosen[np.lexsort((number[chosen], named[chosen]))]
    moved = np.full(len(number), -1, dtype=np.int32)
    moved[order] = np.arange(len(order), dtype=np.int32)
    num_seen = len(order) - int(named.sum())
    if num_seen < 1:
        raise PefllError(
            f"{samples.name}: {argument('unseen_clients')} names all clients, so none is left for training; name fewer",
            code="PEFLL-D605",
        )
    return moved, num_seen


def _number_clients(samples: Samples, client: Array, wanted: int | None, random: np.random.Generator) -> Array:
    """Return a random new number for each client, int32 [n]; -1 for clients that are left out."""
    low = int(client.min())
    if low < 0:
        raise PefllError(f"{samples.name}: there is a client {low}; clients must be numbered from 0", code="PEFLL-D191")
    # A number without samples is not a client.
    there = np.flatnonzero(np.bincount(client))
    if wanted is not None and wanted > len(there):
        raise PefllError(
            f"{samples.name} has {counted(len(there), 'natural client')}; {wanted:,} were asked for", code="PEFLL-D193"
        )
    chosen = random.permutation(there)[:wanted]
    number = np.full(int(client.max()) + 1, -1, dtype=np.int32)
    number[chosen] = np.arange(len(chosen), dtype=np.int32)
    return number


def _check_training(count: Array, samples: Samples, number: Array) -> None:
    """Raise PefllError for clients without training samples; `count` [n, 3] is indexed by clients' new numbers."""
    if int(count[:, TRAIN].min()) >= 1:
        return
    bad = np.flatnonzero((number >= 0) & (count[number, TRAIN] < 1)).tolist()
    names = [samples.name_of(client) for client in bad]
    if len(names) == 1:
        raise PefllError(
            f"{samples.name}: client {names[0]} has no training samples; give it some or leave it out",
            code="PEFLL-D195",
        )
    raise PefllError(
        f"{samples.name}: {len(names):,} clients have no training samples ({first_few(names)}); give them some or "
        "leave them out",
        code="PEFLL-D196",
    )


def _cut_counts(count: Array, samples: Samples, validation: float, test: float) -> None:
    """Move part of each client's training samples in `count` [n, 3] to the splits that the data does not have."""
    moves = [(TEST, test)] if samples.split is None else []
    if not count[:, VALIDATION].any():
        moves.append((VALIDATION, validation))
    for which, fraction in moves:
        rounded = np.floor(fraction * count[:, TRAIN] + 0.5).astype(np.int64)  # rounds halves up
        moved = np.minimum(rounded, count[:, TRAIN] - 1)
        count[:, which] += moved
        count[:, TRAIN] -= moved


def _num_seen(clients: int, unseen: float) -> int:
    unseen = share(unseen, "unseen")
    seen = clients - math.floor(unseen * clients + 0.5)
    if seen < 1:
        raise PefllError(
            f"unseen is {unseen}, which leaves none of {counted(clients, 'client')} for training; lower it",
            code="PEFLL-D197",
        )
    return seen


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


def check_is_samples(samples: object) -> None:
    """Raise PefllError for a value that is not `Samples`."""
    if not isinstance(samples, Samples):
        raise PefllError(
            f"samples are needed, not {shown(samples)}: make them with pefll.samples_from_arrays(x, y) or "
            "pefll.load_samples(name)",
            code="PEFLL-A015",
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
