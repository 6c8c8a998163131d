"""Partitions by the clients that the data names: natural ones, and a user's own lists of indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pefll.core.arguments import listed, share, shown, whole_number
from pefll.core.errors import PefllError
from pefll.core.randomness import generator
from pefll.core.wording import argument, counted, first_few
from pefll.data.assembly import assemble
from pefll.data.federation import Federation
from pefll.data.samples import SPLITS, TEST, TRAIN, VALIDATION, Array, Samples, check_is_samples
from pefll.data.seen_clients import UNSEEN, named_last, names_of_clients, number_of_seen


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
        number, num_seen = named_last(samples, number, named)
    else:
        num_seen = number_of_seen(total, unseen)

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
