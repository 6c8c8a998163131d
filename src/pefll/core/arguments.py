"""Checks of a user's arguments. Each function returns a plain Python value, or raises PefllError."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pefll.core.errors import PefllError

# Seeds, counts and rounds become int64 in arrays, on a GPU and in messages.
MOST = (1 << 63) - 1

MOST_BYTES = 255  # longest name of a file on usual file systems


def plain(value: Any) -> Any:
    """Return the Python value of a NumPy number or of an array or tensor without axes; other values unchanged."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        try:
            return value.item()
        except (RuntimeError, ValueError, NotImplementedError):  # a tensor without data
            return value
    return value


def whole_number(value: Any, name: str, least: int | None = None, most: int = MOST) -> int:
    """Return an integer from `least` to `most`; PefllError for anything else, including 3.0, "3" and True."""
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int):
        advice = f", for example {int(number)}" if isinstance(number, float) and number.is_integer() else ""
        raise PefllError(f"{name} is {shown(value)}; it must be a whole number{advice}", code="PEFLL-A001")
    if least is not None and number < least:
        reason = "it cannot be negative" if least == 0 else f"it must be at least {least}"
        raise PefllError(f"{name} is {shown(number)}; {reason}", code="PEFLL-A002")
    if not -most <= number <= most:
        raise PefllError(f"{name} is {shown(number)}; it must be at most {most:,}", code="PEFLL-A003")
    return number


def number(value: Any, name: str) -> float:
    """Return a finite number as a float; PefllError for anything else, including True and texts."""
    given = plain(value)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise PefllError(f"{name} is {shown(value)}; it must be a number", code="PEFLL-A004")
    try:
        found = float(given)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise PefllError(f"{name} is {shown(value)}; it must be a finite number", code="PEFLL-A005")
    return found


def share(value: Any, name: str) -> float:
    """Return a fraction, at least 0 and below 1; PefllError for anything else, such as a list of clients."""
    given = plain(value)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise PefllError(f"{name} is {shown(value)}; it must be a fraction, for example 0.1", code="PEFLL-A006")
    found = number(given, name)
    if not 0 <= found < 1:
        raise PefllError(f"{name} is {found}; it must be at least 0 and below 1, for example 0.1", "PEFLL-A007")
    return found


def text(value: Any, name: str, example: str = "") -> str:
    """Return a text; PefllError for anything else."""
    given = plain(value)
    if not isinstance(given, str):
        advice = f", for example {example!r}" if example else ""
        raise PefllError(f"{name} is {shown(value)}; it must be a text{advice}", code="PEFLL-A008")
    return given


def in_utf8(name: str) -> str:
    """Return a name, such as a column's, that the command line or a setting gave in the encoding of file names.

    Files are UTF-8 everywhere. In another locale, Python gives the letters of the command line as escaped bytes.
    """
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def truth(value: Any, name: str) -> bool:
    """Return True or False; PefllError for anything else."""
    given = plain(value)
    if not isinstance(given, bool):
        raise PefllError(f"{name} is {shown(value)}; it must be True or False", code="PEFLL-A009")
    return given


def path(value: Any, name: str = "the path") -> Path:
    """Return the `Path` of a text or a `Path`; PefllError for other values and for impossible file names."""
    given = plain(value)
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise PefllError(f"{name} is {shown(value)}; it must be a text or a pathlib.Path", code="PEFLL-A010")
    if "\0" in os.fspath(given):
        raise PefllError(f"{name} has a zero byte; remove it", code="PEFLL-A024")
    long = [part for part in Path(given).parts if len(os.fsencode(part)) > MOST_BYTES]
    if long:
        raise PefllError(
            f"{name} has a part of {len(os.fsencode(long[0])):,} bytes; names of files have at most {MOST_BYTES}",
            code="PEFLL-A025",
        )
    return Path(given)


def listed(values: Any, name: str, example: str) -> list[Any]:
    """Return the members of a list, tuple, range or array; PefllError for a single value, a text or a mapping."""
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) != 1:
        raise PefllError(f"{name} is {shown(values)}; it must be a list, for example {example}", code="PEFLL-A011")
    return list(values)


def shown(value: Any) -> str:
    """Return a value as short text in one line, for an error sentence. A large value becomes its type."""
    if isinstance(value, int) and not isinstance(value, bool):
        # Python refuses to print thousands of digits, so the number of digits is estimated.
        digits = int(value.bit_length() * math.log10(2)) + 1
        return f"{value:,}" if value.bit_length() < 80 else f"a whole number of {digits:,} digits"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if not isinstance(value, str | float | bool | bytes | list | tuple | dict | None) and not hasattr(value, "item"):
        return f"a {type(value).__name__}"
    words = " ".join(repr(value).split()) if _is_small(value) else ""
    return words if 0 < len(words) <= 80 else f"a {type(value).__name__}"


def _is_small(value: Any) -> bool:
    """Return whether the `repr` of a value is cheap; a list of a million arrays has an expensive one."""
    if isinstance(value, int):
        return value.bit_length() < 80
    size = getattr(value, "size", None)
    if isinstance(size, int) and size > 10:
        return False
    if isinstance(value, list | tuple):
        return len(value) <= 10 and all(_is_small(each) for each in value)
    return not hasattr(value, "__len__") or len(value) <= 80 if getattr(value, "ndim", 1) else True
