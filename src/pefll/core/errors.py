"""The one exception a user of this package has to know."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PefllError(Exception):
    """Something the user can mend. Its text is one sentence that says what is wrong and what to do.

    Attributes:
        code: stable name of the error, for example `"PEFLL-D135"`; empty for errors that have none yet.
    """

    def __init__(self, sentence: str = "", code: str = "") -> None:
        super().__init__(sentence)
        self.code = code

    def __str__(self) -> str:
        sentence = super().__str__()
        return f"{sentence} [{self.code}]" if self.code else sentence

    def __reduce__(self) -> tuple[type[PefllError], tuple[str, str]]:
        return type(self), (super().__str__(), self.code)  # workers send errors between processes


class Diverged(PefllError):
    """Training came to numbers that are not finite."""


def unknown(kind: str, name: str, known: Iterable[str]) -> PefllError:
    """Return the error for a name that is not among the known ones, with the nearest known name first.

    Args:
        kind: what the name should be, for example `"method"`.
        name: what the user wrote.
        known: the names that exist.
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.74)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return PefllError(f"unknown {kind} {name!r}: {hint}known are {', '.join(names)}", code="PEFLL-A101")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or what kind it is of where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
