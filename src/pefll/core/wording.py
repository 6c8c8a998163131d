"""Numbers, lists and the names of arguments inside sentences."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Whether whoever reads a sentence gave a command; else they called a function.
_gave_a_command: ContextVar[bool] = ContextVar("gave_a_command", default=False)


@contextmanager
def for_the_command_line(on: bool = True) -> Iterator[None]:
    """Let sentences that are made inside the block name options of commands, not arguments of functions.

    Args:
        on: False for what names arguments all the same, such as a file of settings.
    """
    before = _gave_a_command.set(on)
    try:
        yield
    finally:
        _gave_a_command.reset(before)


def either(command: str, python: str) -> str:
    """Return what to say to somebody who gave a command, or to somebody who called a function.

    Args:
        command: for the first.
        python: for the second.
    """
    return command if _gave_a_command.get() else python


def argument(name: str, value: object = None, *, option: str = "") -> str:
    """Return an argument as the reader would write it: `device='cpu'`, or `--device cpu` on the command line.

    Args:
        name: of the function's argument.
        value: for an example; None for the name alone, and True for an option that is a switch.
        option: of the command, where it is not called as the argument is.
    """
    option = option or f"--{name.replace('_', '-')}"
    if value is None:
        return either(option, name)
    return either(option if value is True else f"{option} {shlex.quote(str(value))}", f"{name}={value!r}")


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
