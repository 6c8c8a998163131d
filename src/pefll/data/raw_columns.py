"""Columns of a user's table, read as numbers: float64 with NaN for missing values."""

from __future__ import annotations

import datetime
import math
import numbers
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pefll.core.errors import PefllError, unknown
from pefll.core.wording import argument, counted, either, first_few
from pefll.data.dates import dates_in_numbers, has_dates_in_numbers, is_date, is_local_date, parsed_date

Array = npt.NDArray[Any]

KINDS = ("number", "boolean", "category", "date", "calendar", "text", "decimal-comma")
NUMBER, BOOLEAN, CATEGORY, DATE, CALENDAR, TEXT, DECIMAL_COMMA = KINDS
# What a user may ask for. Booleans are found by themselves.
RULES = (NUMBER, CATEGORY, DATE, CALENDAR, TEXT, DECIMAL_COMMA)

# A category has at most this many inputs of its own. Rarer values share one input.
MOST_VALUES = 32
# A column with more different texts than this, or with more than one for every two rows, is no category.
_MANY_TEXTS, _FEW_ROWS = 1_000, 50
_LONGEST = 1_000  # most characters of a category's value
_DAY = 86_400.0  # seconds
# Numbers as 3,5 or 1.234,5 or 1,234.5: the comma is a decimal point, or separates thousands.
_GROUP = "[. '\u00a0\u202f]"  # what separates thousands, beside the comma
_COMMA = re.compile(rf"[+-]?(\d+,\d+|\d{{1,3}}({_GROUP}\d{{3}})+,\d+|\d{{1,3}}(,\d{{3}})+(\.\d+)?)")
_DECIMAL_COMMA = re.compile(rf"[+-]?((\d+|\d{{1,3}}({_GROUP}\d{{3}})+)(,\d+)?|,\d+)")
# Numbers with a unit, as 12% or $3.50 or 80 kg or 20 °C, and times of the day. 1.2.3 is a version, and no number.
_UNIT = re.compile(
    r"(?P<before>[+-]?[$€£¥]?) ?[+-]?(?:\d{1,3}(?:\.\d{3})+(?:,\d+)?|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)?)"
    r" ?(?P<after>[%‰$€£¥]|°?[A-Za-zµ]{0,4}[²³]?(?:/[A-Za-z]{1,4}[²³]?)?)"
)
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?( ?[AaPp][Mm])?")
# The rule to suggest for a column that needs one, by the code of its error.
SUGGESTED = {"PEFLL-D584": TEXT, "PEFLL-D585": DATE, "PEFLL-D614": DECIMAL_COMMA, "PEFLL-D670": NUMBER}
# What gets the row of a cell that cannot be read, and its error.
BadCell = Callable[[int, PefllError], object]
_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")


@dataclass(frozen=True)
class RawColumn:
    """A column of a table, as `read_column` read it.

    Attributes:
        name: its name in the table.
        kind: one of `KINDS`.
        values: the texts that the column's codes stand for; only for categories and texts.
    """

    name: str
    kind: str
    values: tuple[str, ...] = ()


class Unread:
    """Stands for each value of a column of lists, or of other nested values, that was not read from a file."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def refuse_unread(values: Array, name: str, where: str) -> None:
    """Raise PefllError if a column [N] was not read, because its values are nested."""
    if values.dtype == object and values.size and isinstance(values.flat[0], Unread):
        raise _no_values(where, name, values.flat[0].kind)


def refuse_cell(row: int, error: PefllError) -> None:
    """Raise the error of a cell that cannot be read."""
    del row
    raise error


def read_column(
    values: Array, name: str, where: str, rule: str = "", bad: BadCell = refuse_cell
) -> tuple[RawColumn, Array]:
    """Return a table's column, and its values as float64 [N] with NaN for missing ones.

    Numbers and booleans stay as they are, dates become days since 1970, and texts become codes.

    Args:
        values: [N] numbers, booleans, dates, texts, or a mixture of one of these with missing values.
        name: name of the column.
        where: name of the table, for errors.
        rule: one of `KINDS`; "" to find out. Dates and long texts need a rule.
        bad: called for each cell that cannot be read. By default it raises the error; otherwise the value is NaN.
    """
    kind = values.dtype.kind
    if kind == "M":
        return _dates(name, values.astype("datetime64[us]").astype(np.float64), np.isnat(values), rule, where)
    if kind in "uif" and rule != CATEGORY:
        return _found_numbers(values.astype(np.float64), name, where, rule, bad)
    if kind == "b" and rule != CATEGORY:
        if rule not in ("", NUMBER, BOOLEAN):
            raise _wrong_kind(where, name, "booleans", rule)
        return RawColumn(name, rule or BOOLEAN), values.astype(np.float64)
    if kind not in "uifbOUS":
        raise _no_values(where, name, str(values.dtype))
    if kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    return _objects(values.tolist(), name, where, rule, bad)


def _objects(values: list[Any], name: str, where: str, rule: str, bad: BadCell) -> tuple[RawColumn, Array]:
    """Return the column of a list of Python values; see `read_column`."""
    missing = np.fromiter(map(is_missing, values), dtype=bool, count=len(values))
    types = {type(value) for value, gap in zip(values, missing, strict=True) if not gap}
    texts = all(issubclass(each, str) for each in types)
    if not types:
        return RawColumn(name, rule or NUMBER), np.full(len(values), np.nan)
    if all(issubclass(each, datetime.date) for each in types):
        days = [0.0 if gap else _microseconds(value) for value, gap in zip(values, missing, strict=True)]
        return _dates(name, np.asarray(days), missing, rule, where)
    if rule == CATEGORY or (rule == TEXT and texts):
        return _texts(values, missing, name, where, rule)
    is_boolean = all(issubclass(each, bool | np.bool_) for each in types)
    if is_boolean or all(issubclass(each, numbers.Number) or each.__name__ == "Decimal" for each in types):
        found = np.asarray([math.nan if gap else _as_float(value) for value, gap in zip(values, missing, strict=True)])
        if not is_boolean:
            return _found_numbers(found, name, where, rule, bad)
        if rule not in ("", NUMBER, BOOLEAN):
            raise _wrong_kind(where, name, "booleans", rule)
        return RawColumn(name, rule or BOOLEAN), found
    if rule in (NUMBER, BOOLEAN, DECIMAL_COMMA) and all(issubclass(each, str | numbers.Number) for each in types):
        return RawColumn(name, rule), _numbers_in_texts(values, missing, name, where, rule, bad)
    if texts and (rule in (DATE, CALENDAR) or (not rule and _are_dates(values, missing))):
        return _dates(name, _parsed_dates(values, missing, name, where, bad), missing, rule, where)
    if not texts and not all(issubclass(each, str | numbers.Number) for each in types):
        raise _no_values(where, name, " and ".join(sorted(each.__name__ for each in types)[:3]))
    if rule:
        raise _wrong_kind(where, name, "texts", rule)
    return _texts(values, missing, name, where, rule)


def _found_numbers(values: Array, name: str, where: str, rule: str, bad: BadCell) -> tuple[RawColumn, Array]:
    """Return the column of numbers, float64 [N] with NaN for missing ones, which may be dates such as 20240131."""
    if rule in (DATE, CALENDAR):
        missing, days = np.isnan(values), dates_in_numbers(values)
        wrong = np.isnan(days) & ~missing
        if wrong.any() and (wrong | missing).all():
            raise _wrong_kind(where, name, "numbers", rule)
        for row in np.flatnonzero(wrong).tolist():
            bad(row, _no_date(f"{values[row]:.15g}", row, name, where))
        return RawColumn(name, rule), days
    if rule not in ("", NUMBER, BOOLEAN, DECIMAL_COMMA):
        raise _wrong_kind(where, name, "numbers", rule)
    if not rule and has_dates_in_numbers(values):
        first = f"{values[~np.isnan(values)][0]:.0f}"
        raise _needs_date_rule(
            name, where, f"dates such as {first}", f", or {_treat(name, NUMBER)} if they are numbers"
        )
    return RawColumn(name, rule or NUMBER), values


def _texts(values: list[Any], missing: Array, name: str, where: str, rule: str) -> tuple[RawColumn, Array]:
    """Return a column of texts as codes; PefllError if it is no category and no rule says what it is."""
    words = [None if gap else _text_of(value) for value, gap in zip(values, missing, strict=True)]
    different = sorted({word for word in words if word is not None})
    longest = max(map(len, different), default=0)
    rows = int(len(words) - missing.sum())
    if not rule:
        _check_categories(different, rows, name, where)
    if longest > _LONGEST and rule != TEXT:
        raise PefllError(
            f"{where}: column {name!r} has a value of {longest:,} characters, which is no category; {_advice(name)}",
            code="PEFLL-D581",
        )
    place: dict[str | None, float] = {word: float(code) for code, word in enumerate(different)}
    codes = np.fromiter((place.get(word, math.nan) for word in words), dtype=np.float64, count=len(words))
    return RawColumn(name, rule or CATEGORY, tuple(different)), codes


def _check_categories(different: list[str], rows: int, name: str, where: str) -> None:
    """Raise PefllError for texts that look like dates, like numbers, or like free text."""
    if different and all(map(is_local_date, different)):
        raise PefllError(
            f"{where}: column {name!r} has dates such as {different[0]!r}, which countries read differently; write "
            f"them as 2024-12-31, or {_leave_out(name)}",
            code="PEFLL-D582",
        )
    commas = [word for word in different if _COMMA.fullmatch(word)]
    if commas and all(_COMMA.fullmatch(word) or is_number(word) for word in different):
        raise PefllError(
            f"{where}: column {name!r} has numbers with commas such as {commas[0]!r}; use "
            f"{_treat(name, DECIMAL_COMMA)} if it is a decimal point, write them without commas if it separates "
            f"thousands, or use {_treat(name, CATEGORY)}",
            code="PEFLL-D614",
        )
    no_dates = [word for word in different if not is_date(word)]
    if len(different) - len(no_dates) > 2 and 0 < len(no_dates) < len(different) / 2:
        raise PefllError(
            f"{where}: column {name!r} has dates, but also the text {no_dates[0]!r}; leave such cells empty if the "
            f"date is missing, or use it as a category with {_treat(name, CATEGORY)}",
            code="PEFLL-D615",
        )
    odd = [word for word in different if not is_number(word)]
    if len(different) - len(odd) > MOST_VALUES and 0 < len(odd) < len(different) / 2:
        raise PefllError(
            f"{where}: column {name!r} has numbers, but also the text {odd[0]!r}; leave such cells empty if the value "
            f"is missing, or use it as a category with {_treat(name, CATEGORY)}",
            code="PEFLL-D583",
        )
    if len(different) > MOST_VALUES:
        _check_measured(different, odd, name, where)
    if len(different) > _MANY_TEXTS or (rows >= _FEW_ROWS and 2 * len(different) > rows):
        raise PefllError(
            f"{where}: column {name!r} has {len(different):,} different texts in {counted(rows, 'row')}, which is no "
            f"category; {_advice(name)}",
            code="PEFLL-D584",
        )


def _check_measured(different: list[str], odd: list[str], name: str, where: str) -> None:
    """Raise PefllError for many texts that measure something: as categories, most of them would be one input.

    Args:
        different: the texts.
        odd: those that are no numbers.
        name: name of the column.
        where: name of the table, for errors.
    """
    if not odd:
        raise PefllError(
            f"{where}: column {name!r} has numbers that are stored as texts, such as {different[0]!r}; say how to use "
            f"them: {_treat(name, NUMBER)} for numbers, or {_treat(name, CATEGORY)} for codes",
            code="PEFLL-D670",
        )
    measured = all(map(_UNIT.fullmatch, different))  # ends at the first other text: there may be a million notes
    found = map(_UNIT.fullmatch, different if measured else ())
    if len({(one["before"].lstrip("+-"), one["after"]) for one in found if one}) == 1:
        raise PefllError(
            f"{where}: column {name!r} has numbers with a unit or with separators, such as {different[0]!r}; write "
            f"them without, or use {_treat(name, CATEGORY)}",
            code="PEFLL-D671",
        )
    if all(map(_CLOCK.fullmatch, different)):
        raise PefllError(
            f"{where}: column {name!r} has times such as {different[0]!r}; write them as hours, such as 10.5, or use "
            f"{_treat(name, CATEGORY)}",
            code="PEFLL-D672",
        )


def _dates(name: str, micro: Array, missing: Array, rule: str, where: str) -> tuple[RawColumn, Array]:
    """Return a column of dates, given in microseconds since 1970; PefllError without a rule."""
    if rule not in (DATE, CALENDAR):
        if rule:
            raise _wrong_kind(where, name, "dates", rule)
        raise _needs_date_rule(name, where)
    return RawColumn(name, rule), np.where(missing, np.nan, micro / (_DAY * 1e6))


def _needs_date_rule(name: str, where: str, found: str = "dates", more: str = "") -> PefllError:
    return PefllError(
        f"{where}: column {name!r} has {found}; say how to use them: {_treat(name, DATE)} for days (a trend), "
        f"{_treat(name, CALENDAR)} for the time of the year, the week and the day, or {_leave_out(name)}{more}",
        code="PEFLL-D585",
    )


def _no_date(text: str, row: int, name: str, where: str) -> PefllError:
    return PefllError(
        f"{where}: column {name!r} has {text[:40]!r} in row {row + 1:,}, which is no date; write dates as 2024-12-31 "
        "or 2024-12-31 23:59:00",
        code="PEFLL-D586",
    )


def _parsed_dates(values: list[Any], missing: Array, name: str, where: str, bad: BadCell) -> Array:
    """Return texts as microseconds since 1970, float64 [N]; a text that is no date is a bad cell."""
    known: dict[str, float] = {}
    for row, (value, gap) in enumerate(zip(values, missing, strict=True)):
        if gap or not math.isnan(known.get(value, math.nan)):
            continue
        try:
            known[value] = _microseconds(parsed_date(value))
        except ValueError:
            known[value] = math.nan  # the next row with this text is a bad cell, too
            bad(row, _no_date(value, row, name, where))
    return np.asarray([0.0 if gap else known[value] for value, gap in zip(values, missing, strict=True)])


def _microseconds(date: datetime.date) -> float:
    """Return the time since 1970; a time without a zone counts as UTC."""
    if not isinstance(date, datetime.datetime):
        return (date - datetime.date(1970, 1, 1)).days * _DAY * 1e6
    zone = datetime.UTC if date.tzinfo is not None else None
    return (date - datetime.datetime(1970, 1, 1, tzinfo=zone)).total_seconds() * 1e6


def _numbers_in_texts(values: list[Any], missing: Array, name: str, where: str, rule: str, bad: BadCell) -> Array:
    found = np.full(len(values), np.nan)
    for place in np.flatnonzero(~missing).tolist():
        if not isinstance(values[place], str):
            found[place] = _as_float(values[place])
            continue
        word = values[place].strip()
        if rule == BOOLEAN and word.lower() in (*_TRUE, *_FALSE):
            found[place] = word.lower() in _TRUE
        elif rule == DECIMAL_COMMA and _DECIMAL_COMMA.fullmatch(word):
            found[place] = float(re.sub(_GROUP, "", word).replace(",", "."))
        elif is_number(word) and rule != DECIMAL_COMMA:
            found[place] = float(word)
        else:
            needed = {NUMBER: "a number", BOOLEAN: "true or false"}.get(rule, "a number such as 3,5")
            error = PefllError(
                f"{where}: column {name!r} has the text {word[:40]!r} in row {place + 1:,} where {needed} is needed; "
                "correct it, or leave the cell empty if the value is missing",
                code="PEFLL-D587",
            )
            bad(place, error)
    return found


def has_commas(word: str) -> bool:
    """Return whether a text is a number with a comma, such as 3,5."""
    return _COMMA.fullmatch(word.strip()) is not None


def is_missing(value: Any) -> bool:
    """Return whether a value of a table or a label is missing: None, NaN, NaT or an empty text."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, str):
        return not value.strip()
    return isinstance(value, float) and value != value


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):  # a whole number beyond float64, or a complex one
        return math.inf


def _text_of(value: Any) -> str:
    """Return a category's value as text: 7 and 7.0 are the same, because missing values turn integers into floats."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value.strip() if isinstance(value, str) else str(value)


def is_number(word: str) -> bool:
    """Return whether a text is a finite number."""
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _are_dates(values: list[Any], missing: Array) -> bool:
    return all(gap or is_date(value) for value, gap in zip(values, missing, strict=True))


def all_unclear(errors: Mapping[str, PefllError]) -> PefllError:
    """Return one error for all columns that need a rule, given the error of each: the first one names the others."""
    name, first = next(iter(errors.items()))
    others = [other for other in errors if other != name]
    if not others:
        return first
    rules = {each: SUGGESTED[error.code] for each, error in errors.items()}
    words = ",".join(f"{each}={rule}" for each, rule in rules.items())
    given = either(f"--treat {shlex.quote(words)}", f"treat={rules!r}")
    needs = "needs a rule" if len(others) == 1 else "need rules"
    return PefllError(f"{first.args[0]}; {first_few(map(repr, others))} {needs}, too, for example {given}", first.code)


def check_rules(rules: Mapping[str, str], names: Sequence[str], where: str) -> None:
    """Raise PefllError for a rule that does not exist, or that is about a column that is not a feature."""
    for name, rule in rules.items():
        if rule not in RULES:
            raise unknown("rule for a column", rule, RULES)
        if name not in names:
            raise PefllError(
                f"{where}: {_treat(name, rule)} is about a column that is not among the features; correct its name",
                code="PEFLL-D589",
            )


def _treat(name: str, rule: str) -> str:
    return either(f"--treat '{name}={rule}'", f"treat={{{name!r}: {rule!r}}}")


def _leave_out(name: str) -> str:
    return f"leave it out with {either(f'--drop {name!r}', f'drop=[{name!r}]')}"


def _advice(name: str) -> str:
    return f"{_leave_out(name)}, or count its words with {_treat(name, TEXT)}"


def _wrong_kind(where: str, name: str, found: str, rule: str) -> PefllError:
    return PefllError(
        f"{where}: column {name!r} has {found}, but it is used as {rule}; give it the values that it is meant to have, "
        f"or change {argument('treat')}",
        code="PEFLL-D590",
    )


def _no_values(where: str, name: str, found: str) -> PefllError:
    return PefllError(
        f"{where}: column {name!r} has values of type {found}, which do not hold numbers, texts or dates; turn it into "
        f"numbers, or {_leave_out(name)}",
        code="PEFLL-D160",
    )
