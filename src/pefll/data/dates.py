"""Reads dates in texts and in numbers such as 20240131, if there is one way only to read them."""

from __future__ import annotations

import datetime
import re

import numpy as np
import numpy.typing as npt

_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?")
# In these dates, countries differ in the order of day and month, or in the century of the year.
_LOCAL = re.compile(r"\d{1,2}([./-])\d{1,2}\1(\d{4}|\d{2})([T ].*)?|\d{1,2}[ -][A-Za-z]{3,9}\.?[ -]\d{2}([T ].*)?")
_TIME = r"(?:[T ,]+(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}))?)?"
_DAY, _YEAR, _NAME = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?", r"(?P<year>\d{4})", r"(?P<name>[A-Za-z]{3,9})\.?"
_FORMS = [
    re.compile(form)
    for form in (
        r"(?P<year>\d{4})-(?P<month>\d{2})",  # 2024-01
        r"(?P<year>\d{4})(?P<month>\d{2})(?P<day>\d{2})",  # 20240131
        rf"(?P<year>\d{{4}})(?P<mark>[./-])(?P<month>\d{{1,2}})(?P=mark)(?P<day>\d{{1,2}}){_TIME}",  # 2024/1/31
        rf"(?:[A-Za-z]{{3,9}},? )?{_DAY}[ .-]+{_NAME}[ ,-]+{_YEAR}{_TIME}",  # 31 Jan 2024
        rf"(?:[A-Za-z]{{3,9}},? )?{_NAME} {_DAY},? {_YEAR}{_TIME}",  # Jan 31, 2024
        rf"{_NAME}[ -]{_YEAR}",  # Jan 2024
    )
]
_MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
           "december")  # fmt: skip
_YEARS = (1800, 2200)  # other years are rather codes, except in ISO dates


def parsed_date(text: str) -> datetime.datetime:
    """Return the date in a text, with the time if it has one; ValueError if it is none, or can be read differently."""
    text = text.strip()
    if _ISO.fullmatch(text):
        return datetime.datetime.fromisoformat(text.replace(",", "."))
    for form in _FORMS:
        if found := form.fullmatch(text):
            part = found.groupdict()
            year, hour, minute, second = (int(part.get(name) or 0) for name in ("year", "hour", "minute", "second"))
            month = _month(part["name"]) if "name" in part else int(part["month"])
            if not _YEARS[0] <= year <= _YEARS[1]:
                raise ValueError(f"{text!r} has the year {year}")
            # A month alone is its first day.
            return datetime.datetime(year, month, int(part.get("day") or 1), hour, minute, second)
    raise ValueError(f"{text!r} is no date")


def is_date(text: str) -> bool:
    """Return whether a text has the form of a date that can be read in one way only."""
    if _ISO.fullmatch(text.strip()):
        return True  # a day that does not exist, such as 2024-02-31, is a wrong date
    try:
        parsed_date(text)
    except ValueError:
        return False
    return True


def is_local_date(text: str) -> bool:
    """Return whether a text looks like a date that countries read differently."""
    return _LOCAL.fullmatch(text.strip()) is not None and not is_date(text)


def dates_in_numbers(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return numbers such as 20240131 as days since 1970, float64 [N]; NaN for missing and for other numbers."""
    days = np.full(len(values), np.nan)
    known: dict[float, float] = {}
    low, high = _YEARS[0] * 10_000, (_YEARS[1] + 1) * 10_000
    for place in np.flatnonzero((values >= low) & (values < high) & (np.floor(values) == values)).tolist():
        value = float(values[place])
        if value not in known:
            try:
                known[value] = (parsed_date(str(int(value))) - datetime.datetime(1970, 1, 1)).days
            except ValueError:
                known[value] = np.nan
        days[place] = known[value]
    return days


def has_dates_in_numbers(values: npt.NDArray[np.float64]) -> bool:
    """Return whether all numbers of a column are dates such as 20240131, of at least two days."""
    present = values[~np.isnan(values)]
    # Most columns are no dates, as their first values already show.
    if not len(present) or np.isnan(dates_in_numbers(present[:10])).any():
        return False
    days = dates_in_numbers(present)
    return not np.isnan(days).any() and float(days.min()) < float(days.max())


def _month(name: str) -> int:
    """Return the number of a month, given by its English name or the name's first three letters."""
    name = name.lower()
    for number, month in enumerate(_MONTHS, 1):
        if name == month or name == month[:3] or (name == "sept" and number == 9):
            return number
    raise ValueError(f"{name!r} is no month")
