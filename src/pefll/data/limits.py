"""How large the data in a file may become when it is read: a small file must not fill a machine's memory."""

from __future__ import annotations

import math
import os

from pefll.core.errors import PefllError
from pefll.core.machine import available_memory

VARIABLE = "PEFLL_DATA_LIMIT_GB"
# Pictures and tables of measurements compress by 2 to 30. What becomes a hundred times as large is made for it, or so
# regular that there is little to learn from it; a file of a few kilobytes is let be.
EXPANSION, ALWAYS = 100, 1 << 28
PICTURE = 100_000_000  # bytes of one picture


def check_growth(what: str, stored: int, needed: int) -> None:
    """Raise PefllError where data would take more memory than its file lets one expect, or than there is.

    Args:
        what: is read, for the sentence.
        stored: bytes of the file.
        needed: bytes in memory.
    """
    limit = _chosen() or max(ALWAYS, EXPANSION * stored)
    if needed > limit:
        raise PefllError(
            f"{what} has {_size(stored)} but would take {_size(needed)} of memory, where {_size(limit)} are the most; "
            f"if that is right, set the environment variable {VARIABLE}={_gigabytes(needed)}",
            code="PEFLL-L002",
        )
    there = available_memory()
    if there is not None and needed > there:
        raise PefllError(
            f"{what} would take {_size(needed)} of memory, but only {_size(there)} are left; take fewer samples, or a "
            "machine with more memory",
            code="PEFLL-L003",
        )


def check_picture(what: str, width: int, height: int, channels: int) -> None:
    """Raise PefllError for one picture that is too large to be a sample, before it is decoded."""
    needed, limit = width * height * channels, _chosen() or PICTURE
    if needed > limit:
        raise PefllError(
            f"{what} has {width:,}x{height:,} pixels, {_size(needed)} of memory, where {_size(limit)} are the most for "
            f"one picture; make it smaller, or set the environment variable {VARIABLE}={_gigabytes(needed)}",
            code="PEFLL-L004",
        )


def _chosen() -> int | None:
    """Return the limit that the user has set, in bytes; None where there is none."""
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
    """Return bytes as in a sentence, such as 1.5 MB."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if amount >= unit:
            return f"{amount / unit:.3g} {name}" if amount < 1000 * unit else f"{amount // unit:,} {name}"
    return f"{amount} bytes"


def _gigabytes(amount: int) -> int:
    return -(-amount // 10**9)
