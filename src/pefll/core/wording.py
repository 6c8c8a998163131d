"""Wording of numbers, lists and names of arguments in sentences for users."""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pefll.core.errors import PefllError

# True if the reader of a sentence uses the command line, False if they use Python.
_gave_a_command: ContextVar[bool] = ContextVar("gave_a_command", default=False)


@contextmanager
def for_the_command_line(on: bool = True) -> Iterator[None]:
    """Inside the block, sentences name options of commands, not arguments of functions; `on=False` undoes that."""
    before = _gave_a_command.set(on)
    try:
        yield
    finally:
        _gave_a_command.reset(before)


def either(command: str, python: str) -> str:
    """Return `command` for readers who use the command line, and `python` for readers who use Python."""
    return command if _gave_a_command.get() else python


def argument(name: str, value: object = None, *, option: str = "") -> str:
    """Return an argument as the reader writes it: `device='cpu'`, or `--device cpu` on the command line.

    Without a value, only the name is returned. An option with the value True is a flag, shown without a value. `option`
    is the name on the command line, if it differs.
    """
    option = option or f"--{name.replace('_', '-')}"
    if value is None:
        return either(option, name)
    return either(option if value is True else f"{option} {shlex.quote(str(value))}", f"{name}={value!r}")


# Characters that a terminal acts on instead of showing them: C0 but the line end, DEL, C1, and marks that change the
# direction of the text around them.
_UNSHOWN = dict.fromkeys([*range(10), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)])
_UNSHOWN |= {ord("\t"): " ", **dict.fromkeys(range(0xD800, 0xE000), "\ufffd")}


def harmless(text: str) -> str:
    """Return a text without characters that change a terminal, and valid in UTF-8; line ends and accents stay.

    Names in files may come from a stranger.
    """
    return text if text.isascii() and text.isprintable() else text.translate(_UNSHOWN)


def all_harmless(value: Any) -> Any:
    """Return a JSON value in which all texts are `harmless`."""
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, dict):
        return {harmless(key): all_harmless(each) for key, each in value.items()}
    return [all_harmless(each) for each in value] if isinstance(value, list) else value


def counted(number: int, thing: str) -> str:
    """Return a number with its noun, for example `"1 client"`, `"2,000 clients"` or `"2 classes"`."""
    if number == 1:
        return f"1 {thing}"
    return f"{number:,} {thing}{'es' if thing.endswith('s') else 's'}"


def without_samples(number: int, clients: int, split: str) -> str:
    """Return a sentence: `number` of `clients` clients have no sample in a split, so accuracies leave them out."""
    if number == clients:
        return f"No client has a {split} sample, so there is no accuracy: clients need more than one sample each."
    has = "has" if number == 1 else "have"
    return f"{number:,} of {counted(clients, 'client')} {has} no {split} sample: accuracies are those of the others."


def first_few(names: Iterable[object], most: int = 5) -> str:
    """Return names for a sentence, for example `"1, 2 and 3"` or `"1, 2, 3, 4, 5 and 12 more"`."""
    words = [str(name) for name in names]
    if len(words) > most + 1:  # instead of "1 more", that one name is shown
        words = [*words[:most], f"{len(words) - most:,} more"]
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def reasons(errors: Mapping[Any, PefllError], most: int = 5) -> str:
    """Return the errors of clients for the end of a sentence: one goes on in its line, and several have a line each.

    Clients whose errors have the same code are listed together.
    """
    groups: dict[str, list[Any]] = {}
    for client, error in errors.items():
        groups.setdefault(error.code, []).append(client)
    words = [
        f"{clients[0]}: {errors[clients[0]]}" + (f" (likewise {first_few(clients[1:])})" if clients[1:] else "")
        for clients in groups.values()
    ]
    if len(words) == 1:
        return f": {words[0]}"
    left_out = [f"and {counted(len(words) - most, 'more reason')}"] if len(words) > most else []
    return "".join(f"\n  {word}" for word in (*words[:most], *left_out))


def similar(name: str, known: Iterable[str]) -> str:
    """Return the first name in `known` with the letters and digits of `name`, ignoring case; "" if there is none."""
    wanted = _letters(name)
    return next((each for each in known if wanted and _letters(each) == wanted), "")


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", name).casefold()))
