"""The exception that this package raises for a user's mistakes."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PefllError(Exception):
    """A mistake that the user can correct. Its text says in one sentence what is wrong and what to do.

    Where clients have different errors, each has a line of its own after the sentence and its code.

    Attributes:
        code: stable name of the error, for example `"PEFLL-D135"`, or empty.
    """

    def __init__(self, sentence: str = "", code: str = "") -> None:
        super().__init__(sentence)
        self.code = code

    def __str__(self) -> str:
        first, *more = super().__str__().split("\n", 1)
        return "\n".join([f"{first} [{self.code}]" if self.code else first, *more])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({super().__str__()!r}, {self.code!r})"

    def __reduce__(self) -> tuple[type[PefllError], tuple[str, str]]:
        return type(self), (super().__str__(), self.code)  # workers send errors between processes


class Diverged(PefllError):
    """Training produced numbers that are not finite."""


# What names of other libraries, and of tables, are called here.
_MEANT = {
    **dict.fromkeys(("lr", "learning_rate", "local_lr"), "client_lr"),
    **dict.fromkeys(("epochs", "local_epochs"), "local_steps"),
    **dict.fromkeys(("verbose", "progress"), "console"),
}


def unknown(kind: str, name: str, known: Iterable[str], also: Iterable[str] = ()) -> PefllError:
    """Return the error for an unknown name. It suggests a similar known name.

    Args:
        kind: what the name is of, for example "method".
        name: the unknown name.
        known: all known names, which the sentence lists.
        also: further names that it may suggest.
    """
    names = sorted(known)
    every = [*names, *also]
    meant = _MEANT.get(name.lower())
    near = meant if meant in every else closest(name, every)
    hint = f"did you mean {near!r}? " if near else ""
    return PefllError(f"unknown {kind} {name!r}: {hint}known are {', '.join(names)}", code="PEFLL-A101")


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is almost `name`, or None."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.74)), None)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]
