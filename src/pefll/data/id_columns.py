"""Finds columns of whole numbers that look like identifiers, such as a forgotten column of clients."""

from __future__ import annotations

import re

import numpy as np

from pefll.core.wording import argument, either
from pefll.data.raw_columns import NUMBER
from pefll.data.samples import Array, Samples

_IDS = ("id", "uid", "uuid", "guid")
_OWNERS = ("user", "client", "customer", "patient", "member", "person", "owner", "writer", "author", "subscriber")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_FEWEST = 3  # different values: 0 and 1 are a flag


def id_notes(samples: Samples) -> list[str]:
    """Return a note for each column of a table that is used as a number but looks like an identifier."""
    return [
        _note(samples, column.name)
        for place, column in enumerate(samples.table)
        if column.kind == NUMBER and _has_name_of_ids(column.name) and _has_ids(samples.x[:, place])
    ]


def _has_name_of_ids(name: str) -> bool:
    """Return whether a name is like `user_id`, `userId`, `userid` or `user`."""
    words = [word.casefold() for word in _WORD.findall(name)]
    whole = "".join(words)
    return words[-1:] in [[each] for each in _IDS] or whole in (*_OWNERS, *(f"{each}id" for each in _OWNERS))


def _has_ids(values: Array) -> bool:
    """Return whether a column's values [N] are whole numbers, and several of them."""
    there = values[~np.isnan(values)]
    return bool((np.floor(there) == there).all()) and len(np.unique(there)) >= _FEWEST


def _note(samples: Samples, name: str) -> str:
    client = argument("client", name, option="--client-column")
    drop = either(argument("drop", name), f"drop={[name]}")
    instead = either(argument("treat", f"{name}=category"), f"treat={{{name!r}: 'category'}}")
    what = f"if it names the client of each row, give it with {client}; otherwise " if samples.client is None else ""
    return (
        f"{samples.name}: column {name!r} looks like an identifier, but is used as a number; {what}leave it out with "
        f"{drop}, or say that it is a category with {instead}"
    )
