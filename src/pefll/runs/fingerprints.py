"""Fingerprints of a run's code: what tells networks, losses, metrics and schedules from others of the same name.

Files hold no code, and code that was given in Python often has no name of its own, such as a lambda. A fingerprint of a
network, a loss or a sampling is a list of numbers that it gives for artificial inputs. Processors round differently, so
such numbers are compared up to rounding. A fingerprint of a schedule is a SHA-256.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pefll.core.errors import PefllError

# Part -> its fingerprint: numbers, None for one that is not finite; or a text.
Fingerprints = dict[str, Any]
SHOWN = 16  # most numbers of a network
_NEAR, _TINY = 1e-3, 1e-5  # relative and absolute difference of equal numbers


def some_of(numbers: list[float | None]) -> list[float | None]:
    """Return at most `SHOWN` of some numbers, spread evenly over them."""
    if len(numbers) <= SHOWN:
        return numbers
    return [numbers[place * (len(numbers) - 1) // (SHOWN - 1)] for place in range(SHOWN)]


def differing_part(one: Any, other: Any) -> str:
    """Return the first part in which two fingerprints differ; "" for none.

    Parts that one of them lacks are not compared: runs of earlier versions have none.
    """
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return ""
    return next((part for part, mine in one.items() if part in other and not _equal(mine, other[part])), "")


def check_same_code(started: Any, now: Fingerprints, where: object, advice: str) -> None:
    """Raise PefllError if a run is resumed with other code than it was started with; `where` names the run."""
    part = differing_part(started, now)
    if part:
        what = {"task": "loss or metrics of the task are", "sampling": "sampling is"}.get(part, f"{part} is")
        raise PefllError(
            f"{where}: the {what} not what the run was started with, although the name is the same; pass the same "
            f"code, or {advice}",
            code="PEFLL-R123",
        )


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, list) or not isinstance(other, list):
        return bool(one == other)
    return len(one) == len(other) and all(map(_near, one, other))


def _near(one: Any, other: Any) -> bool:
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return bool(one == other)
    try:
        return math.isclose(one, other, rel_tol=_NEAR, abs_tol=_TINY)
    except OverflowError:  # a whole number in a file may be beyond all floats
        return bool(one == other)
