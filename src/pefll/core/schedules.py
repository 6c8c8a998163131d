"""Schedules: factors of a learning rate as a function of the round."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from pefll.core.arguments import plain, shown
from pefll.core.errors import PefllError, first_line, unknown
from pefll.core.plugins import fault, import_name
from pefll.core.wording import argument

# Maps the number of a round (0 for the first) to the factor of the learning rate in that round.
Schedule: TypeAlias = Callable[[int], float]

MOST = 100_000  # rounds whose factors are computed before a run

FORMS = {
    "constant": "constant",
    "cosine": "cosine, or 'cosine LAST' with the last factor, such as 'cosine 0.01'",
    "step": "step ROUNDS FACTOR, such as 'step 300 0.1'",
}


def cosine(rounds: int, last: float = 0.0) -> Schedule:
    """Return a schedule that falls from 1 to `last` along half a cosine in `rounds` rounds."""
    return lambda t: last + (1 - last) * 0.5 * (1 + math.cos(math.pi * min(t, rounds) / max(rounds, 1)))


def step(every: int, factor: float) -> Schedule:
    """Return a schedule that multiplies the rate by `factor` after each `every` rounds."""
    return lambda t: float(factor ** (t // every))


def parse_schedule(text: str, name: str, rounds: int) -> Schedule | None:
    """Return the schedule that a setting names; None for a constant rate.

    Args:
        text: constant, cosine, "cosine LAST", "step ROUNDS FACTOR", or a function package.module:function.
        name: name of the setting, for sentences.
        rounds: number of rounds of the run; a cosine ends there.
    """
    kind, *numbers = text.split() or [""]
    if ":" in text:
        return checked_function(import_name(text, name), name)
    if kind not in FORMS:
        raise unknown(name, kind, [*FORMS, "your.module:function"])
    try:
        values = [float(number) for number in numbers]
        if kind == "constant" and not values:
            return None
        if kind == "cosine" and len(values) <= 1 and all(0 <= last < math.inf for last in values):
            return cosine(rounds, *values)
        if kind == "step" and len(values) == 2 and values[0] >= 1 and values[0].is_integer() and 0 <= values[1] <= 1:
            return step(int(values[0]), values[1])
    except ValueError:
        pass
    raise PefllError(f"{argument(name, text)} is no schedule: write {FORMS[kind]}", code="PEFLL-A550")


def checked_function(function: Any, name: str) -> Schedule:
    """Return a user's function of the round as a schedule; calling it raises PefllError for a factor that is no rate.

    Args:
        function: maps the number of a round to a factor, at least 0.
        name: name of the setting, for sentences.
    """
    if not callable(function):
        raise PefllError(
            f"{name} is {shown(function)}; it must be a function of the round, or one of {', '.join(FORMS)}",
            code="PEFLL-A551",
        )

    def factor(t: int) -> float:
        try:
            value = plain(function(t))
        except Exception as error:  # a user's function may raise anything
            why = fault(error) or f"{type(error).__name__}: {first_line(error)}"
            raise PefllError(
                f"the function {name} failed for round {t}: {why}; correct it", code="PEFLL-A552"
            ) from error
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise PefllError(
                f"the function {name} returned {shown(value)} for round {t}; it must return a finite number, 0 or more",
                code="PEFLL-A553",
            )
        return float(value)

    return factor


def check_rounds(schedule: Schedule, rounds: int) -> None:
    """Call a schedule for all rounds, at most `MOST`, so that a bad factor is an error before the run starts."""
    for t in range(min(rounds, MOST)):
        schedule(t)


def sha256_of(schedule: Schedule, rounds: int) -> str:
    """Return the SHA-256 of a schedule's factors of all rounds, at most `MOST`; nine digits of each count."""
    factors = " ".join(f"{schedule(t):.9g}" for t in range(min(rounds, MOST)))
    return hashlib.sha256(factors.encode()).hexdigest()
