"""Numbers and lists inside sentences."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, thing: str) -> str:
    """Return a number with what it counts, for example `"1 client"` or `"2,000 clients"`.

    Args:
        number: how many.
        thing: one of them; more of them have an s behind, classes an es.
    """
    if number == 1:
        return f"1 {thing}"
    return f"{number:,} {thing}{'es' if thing.endswith('s') else 's'}"


def without_samples(number: int, clients: int, split: str) -> str:
    """Return the sentence for clients that are in no accuracy.

    Args:
        number: how many have no sample in a split.
        clients: how many there are.
        split: its name.
    """
    if number == clients:
        return f"No client has a {split} sample, so there is no accuracy: clients need more than one sample each."
    has = "has" if number == 1 else "have"
    return f"{number:,} of {counted(clients, 'client')} {has} no {split} sample: accuracies are those of the others."


def first_few(names: Iterable[object], most: int = 5) -> str:
    """Return names as in a sentence, for example `"1, 2 and 3"`, or `"1, 2, 3, 4, 5 and 12 more"`."""
    words = [str(name) for name in names]
    if len(words) > most + 1:  # in place of "and 1 more" stands that one's name
        words = [*words[:most], f"{len(words) - most:,} more"]
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)
