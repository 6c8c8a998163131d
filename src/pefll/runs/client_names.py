"""The names of a run's seen and unseen clients, as its summary keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pefll.core.errors import PefllError
from pefll.data.federation import Federation

_OF_DATA = ("natural", "by indices", "their own")  # partitions that keep the clients of the data
_KEY = "client_names"
_MOST, _LETTERS = 10_000, 1_000_000  # clients with names in a summary, and their letters, so that it stays small


class ClientNames(NamedTuple):
    """The names of clients in the data, in the order of the federation. Clients that a partition made have numbers."""

    seen: tuple[str, ...]
    unseen: tuple[str, ...]


def makes_clients(partition: object) -> bool:
    """Return whether a partition makes clients of its own, so that another federation has others."""
    return bool(partition) and partition not in _OF_DATA


def names_in(federation: Federation) -> ClientNames:
    """Return the names of a federation's clients."""
    names = tuple(map(federation.name_of, range(federation.num_clients)))
    return ClientNames(names[: federation.num_seen], names[federation.num_seen :])


def entry_of(federation: Federation) -> dict[str, Any]:
    """Return the entry of a summary with the names of clients; {} if they have none, or if these are too much text."""
    if federation.num_clients > _MOST or not (federation.names or federation.keys is not None):
        return {}
    found = names_in(federation)
    if sum(map(len, (*found.seen, *found.unseen))) > _LETTERS:
        return {}
    return {_KEY: {group: list(names) for group, names in found._asdict().items()}}


def names_of_group(summary: Mapping[str, Any], group: str) -> list[str] | None:
    """Return the names of the clients of a group in a summary; None if it has none."""
    groups = summary.get(_KEY)
    names = groups.get(group) if isinstance(groups, dict) else None
    return list(map(str, names)) if isinstance(names, list) else None


def names_in_summary(summary: Mapping[str, Any]) -> ClientNames:
    """Return the names of the clients of a run that has no data; PefllError if its summary does not know them."""
    seen, unseen = (names_of_group(summary, group) for group in ClientNames._fields)
    if seen is not None and unseen is not None:
        return ClientNames(tuple(seen), tuple(unseen))
    split, total = summary.get("num_seen"), summary.get("num_clients")
    made = makes_clients(summary.get("partition"))
    if made and type(split) is int and type(total) is int and 0 <= split <= total <= _MOST:
        numbers = tuple(map(str, range(total)))
        return ClientNames(numbers[:split], numbers[split:])
    raise PefllError(
        "the run's folder does not name its clients: the run is not finished, it has more than 10,000 clients or very "
        "long names, or an earlier version wrote it; ask the federation that it was trained on: federation.name_of(0)",
        code="PEFLL-T663",
    )
