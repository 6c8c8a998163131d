"""Limits for the memory that a file's data takes, so that a small file cannot fill the memory."""

from __future__ import annotations

import math
import os

from pefll.core.errors import PefllError
from pefll.core.machine import available_memory

VARIABLE = "PEFLL_DATA_LIMIT_GB"
# Compression makes images and tables 2 to 30 times smaller. A file whose data is 100 times larger is hostile, or has
# little to learn from. Every file may take up to `ALWAYS` bytes of memory.
EXPANSION, ALWAYS = 100, 1 << 28
PICTURE = 100_000_000  # most bytes of one image
NUMBER, OBJECT = 8, 64  # bytes of a number in an array; least bytes of a Python object, without its text


def check_growth(what: str, stored: int, needed: int) -> None:
    """Raise PefllError if `needed` bytes of memory are too many for a file of `stored` bytes."""
    limit = _user_limit() or max(ALWAYS, EXPANSION * stored)
    if needed > limit:
        raise PefllError(
            f"{what} has {_size(stored)} and would take {_size(needed)} of memory, but at most {_size(limit)} is "
            f"allowed; if you trust the file, set the environment variable {VARIABLE}={_gigabytes(needed)}",
            code="PEFLL-L002",
        )
    check_fits(what, needed)


def check_fits(what: str, needed: int) -> None:
    """Raise PefllError if `needed` bytes are more than the memory that is left."""
    available = available_memory()
    if available is not None and needed > available:
        raise PefllError(
            f"{what} would take {_size(needed)} of memory, but only {_size(available)} are left; take fewer samples, "
            "or a machine with more memory",
            code="PEFLL-L003",
        )


def check_picture(what: str, width: int, height: int, channels: int) -> None:
    """Raise PefllError for an image that is too large, before it is decoded."""
    needed, limit = width * height * channels, _user_limit() or PICTURE
    if needed > limit:
        raise PefllError(
            f"{what} has {width:,}x{height:,} pixels, {_size(needed)} of memory, but at most {_size(limit)} is allowed "
            f"per picture; make it smaller, or set the environment variable {VARIABLE}={_gigabytes(needed)}",
            code="PEFLL-L004",
        )


def _user_limit() -> int | None:
    """Return the user's limit in bytes; None if there is none."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise PefllError(f"{VARIABLE} is {text!r}; it must be a number of gigabytes, such as 8", code="PEFLL-L005")
    return int(number * 1e9)


def _size(amount: int) -> str:
    """Return an amount of bytes in words, such as 1.5 MB."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if amount >= unit:
            return f"{amount / unit:.3g} {name}" if amount < 1000 * unit else f"{amount // unit:,} {name}"
    return f"{amount} bytes"


def _gigabytes(amount: int) -> int:
    return -(-amount // 10**9)
