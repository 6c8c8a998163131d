"""Which clients of a partition are seen: all but a share, or all but those that a user names."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pefll.core.arguments import listed, plain, share, shown
from pefll.core.errors import PefllError
from pefll.core.wording import argument, counted, first_few
from pefll.data.samples import Array, Samples

UNSEEN = 0.1  # the default share of unseen clients


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


def named_last(samples: Samples, number: Array, names: Sequence[str]) -> tuple[Array, int]:
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


def number_of_seen(clients: int, unseen: float) -> int:
    """Return the number of seen clients among some clients, of which a share is unseen."""
    unseen = share(unseen, "unseen")
    seen = clients - math.floor(unseen * clients + 0.5)
    if seen < 1:
        raise PefllError(
            f"unseen is {unseen}, which leaves none of {counted(clients, 'client')} for training; lower it",
            code="PEFLL-D197",
        )
    return seen
