"""Columns of a user's table, and the plan that turns them into inputs of networks.

A table's values are first read as float64 numbers with NaN for missing ones: `read_column`. A `TablePlan` turns these
numbers into inputs. It is learned from training rows of seen clients alone, and is stored as JSON with a run and with
every personal model. So whoever has the model can use rows as they are.
"""

from __future__ import annotations

import datetime
import math
import numbers
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pefll.core.errors import PefllError, unknown
from pefll.core.wording import argument, counted, either

Array = npt.NDArray[Any]

NUMBER, BOOLEAN, CATEGORY, DATE, CALENDAR, TEXT = KINDS = ("number", "boolean", "category", "date", "calendar", "text")
# What a user may ask for. Booleans are found by themselves.
RULES = (NUMBER, CATEGORY, DATE, CALENDAR, TEXT)

# A category has at most this many inputs of its own. Rarer values share one input.
MOST_VALUES = 32
# A value that only one seen client has gets no input: the plan is in every model file and would give it away.
_CLIENTS_PER_VALUE = 2
# Standardised values are cut here, so that no row can spoil a model, and raw values are recognised.
CLIP = 10.0
# Words of texts are counted in this many inputs, by their hash.
_BUCKETS = 32
# A column with more different texts than this, or with more than one for every two rows, is no category.
_MANY_TEXTS, _FEW_ROWS = 1_000, 50
_LONGEST = 1_000  # most characters of a category's value
# Limits of a plan in a file, which may come from a stranger.
_MOST_COLUMNS, _MOST_INPUTS = 100_000, 1 << 20
_DAY = 86_400.0  # seconds
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?")
_LOCAL_DATE = re.compile(r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}([T ].*)?")
_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")


class Encoded(np.ndarray[Any, Any]):
    """Inputs that a `TablePlan` made, [N, inputs]. So they are not mistaken for raw values."""


def encoded(x: Array) -> Encoded:
    """Return an array, marked as encoded inputs."""
    return np.asarray(x).view(Encoded)


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


@dataclass(frozen=True)
class ColumnPlan:
    """What is done to one column.

    Attributes:
        name: its name in the table.
        kind: one of `KINDS`.
        mean: mean of the training rows; of dates, in days since 1970.
        deviation: standard deviation of the training rows.
        values: the values of a category that have an input each.
        others: whether a category's other values have an input.
        hours: whether a calendar has inputs for the time of the day.
        indicator: whether an input says that the value is missing.
        missing: share of the training rows in which the value is missing.
        left_out: why the column has no inputs; "" if it has some.
    """

    name: str
    kind: str
    mean: float = 0.0
    deviation: float = 1.0
    values: tuple[str, ...] = ()
    others: bool = False
    hours: bool = False
    indicator: bool = False
    missing: float = 0.0
    left_out: str = ""

    @property
    def input_names(self) -> list[str]:
        """The name of each input that the column becomes."""
        if self.left_out:
            return []
        of_kind = {
            CATEGORY: [f"{self.name}={value}" for value in self.values] + [f"{self.name}: others"] * self.others,
            CALENDAR: [f"{self.name}: {part}" for part in _calendar_parts(self.hours)],
            TEXT: [f"{self.name}: words {bucket}" for bucket in range(_BUCKETS)],
        }
        return of_kind.get(self.kind, [self.name]) + [f"{self.name}: missing"] * self.indicator

    @property
    def done(self) -> str:
        """What is done to the column, in words."""
        if self.left_out:
            return f"left out: {self.left_out}"
        if self.kind == CATEGORY:
            words = f"one input for each of {counted(len(self.values), 'value')}" + (
                ", and one for all others" if self.others else "; other values give zeros"
            )
        elif self.kind == CALENDAR:
            words = "day of the year and day of the week" + (", time of the day" if self.hours else "") + " as waves"
        elif self.kind == TEXT:
            words = f"its words counted in {_BUCKETS} inputs"
        elif self.kind == DATE:
            middle = datetime.date(1970, 1, 1) + datetime.timedelta(days=self.mean)
            words = f"days, standardised with mean {middle} and deviation {self.deviation:g} days"
        else:
            words = f"standardised with mean {self.mean:g} and deviation {self.deviation:g}"
        return words + ("; missing values are marked by an input" if self.indicator else "")

    def inputs(self, values: Array, texts: Sequence[str] = ()) -> Array:
        """Return the inputs [N, inputs] of a column's raw values, float64 [N], whose codes stand for `texts`."""
        present = ~np.isnan(values)
        safe = np.where(present, values, self.mean)
        parts: list[Array]
        if self.kind in (CATEGORY, TEXT):
            table = self._hashed(texts) if self.kind == TEXT else self._one_hot(texts)
            codes = np.where(present, values, len(texts)).astype(np.int64)  # the last row of the table is for missing
            parts = [table[codes]]
        elif self.kind == CALENDAR:
            parts = [wave * present for wave in _waves(safe, self.hours)]
        else:
            # Infinite values are mistakes of one client. They become NaN, which the checks of samples find.
            safe = np.where(np.isinf(safe), np.nan, safe)
            parts = [np.clip((safe - self.mean) / self.deviation, -CLIP, CLIP)]
        return np.column_stack([*parts, *([~present] if self.indicator else [])]).astype(np.float32)

    def _one_hot(self, texts: Sequence[str]) -> Array:
        """Return the inputs of each text, and of a missing one, [texts + 1, inputs]."""
        place = {value: number for number, value in enumerate(self.values)}
        table = np.zeros((len(texts) + 1, len(self.values) + self.others), dtype=np.float32)
        for row, value in enumerate(texts):
            column = place.get(value, len(self.values))
            if column < table.shape[1]:
                table[row, column] = 1
        return table

    def _hashed(self, texts: Sequence[str]) -> Array:
        """Return the counts of each text's words, by their hash, and zeros for a missing one, [texts + 1, buckets]."""
        table = np.zeros((len(texts) + 1, _BUCKETS), dtype=np.float32)
        for row, value in enumerate(texts):
            words = re.findall(r"\w+", value.casefold())
            for word in words:
                code = zlib.crc32(word.encode("utf-8", "surrogatepass"))
                table[row, code % _BUCKETS] += 1 if code & 0x80000000 else -1  # signs, so that collisions cancel
            table[row] /= math.sqrt(max(1, len(words)))
        return table


@dataclass(frozen=True)
class TablePlan:
    """What is done to each column of a table before a network gets it."""

    columns: tuple[ColumnPlan, ...]

    @property
    def used(self) -> list[ColumnPlan]:
        """The columns that have inputs."""
        return [each for each in self.columns if not each.left_out]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the table's columns that a new table must have."""
        return tuple(each.name for each in self.used)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The name of each input; all are different."""
        found: dict[str, None] = {}
        for each in self.columns:
            for name in each.input_names:
                free = (name if not number else f"{name} ({number})" for number in range(len(found) + 1))
                found[next(candidate for candidate in free if candidate not in found)] = None
        return tuple(found)

    def inputs(self, raw: Sequence[RawColumn], x: Array) -> Array:
        """Return the inputs float32 [N, inputs] of raw values x, float64 [N, columns]."""
        whole = np.empty((len(x), sum(len(each.input_names) for each in self.used)), dtype=np.float32)
        start = 0
        for place, (plan, column) in enumerate(zip(self.columns, raw, strict=True)):
            if not plan.left_out:
                part = plan.inputs(x[:, place], column.values)
                whole[:, start : start + part.shape[1]] = part
                start += part.shape[1]
        return whole

    def encode(self, columns: Mapping[str, Array], name: str) -> Array:
        """Return the inputs float32 [N, inputs] of a new table's columns, each [N]; errors call the table `name`.

        Infinite values give NaN.
        """
        parts = []
        for plan in self.used:
            column, values = read_column(columns[plan.name], plan.name, name, rule=plan.kind)
            parts.append(plan.inputs(values, column.values))
        return encoded(np.concatenate(parts, axis=1))

    def encode_array(self, x: Array, name: str) -> Array:
        """Return the inputs float32 [N, inputs] of raw values x, [N, columns], in the order of the training table.

        Only a table of numbers has such an array.
        """
        words = [each.name for each in self.columns if each.kind not in (NUMBER, BOOLEAN)]
        if words or x.ndim != 2 or x.shape[1] != len(self.columns) or x.dtype.kind not in "uifb":
            need = f"such as {words[0]!r}" if words else f"{len(self.columns)} of them"
            raise PefllError(
                f"{name}: x is an array of {x.dtype} with shape {list(x.shape)}, but the model was trained on columns "
                f"of a table, {need}; give raw rows as a data frame or a dictionary of columns",
                code="PEFLL-M581",
            )
        return self.encode({each.name: x[:, place] for place, each in enumerate(self.columns)}, name)

    def check_encoded(self, x: Array) -> None:
        """Raise PefllError for a tensor that cannot hold encoded inputs, because a raw value is in it."""
        if x.size and float(np.abs(x).max()) > CLIP:
            row, column = np.unravel_index(np.abs(x).argmax(), x.shape)
            raise PefllError(
                f"x has {x[row, column]:g} as input {self.input_names[column]!r}, but the inputs of this model are "
                f"within {CLIP:g}; give raw rows as a data frame or a dictionary of columns",
                code="PEFLL-M580",
            )

    def report(self) -> list[dict[str, Any]]:
        """Return a row per column: its kind, number of inputs, share of missing values, and what is done to it."""
        return [
            {
                "column": each.name,
                "kind": each.kind,
                "inputs": len(each.input_names),
                "missing": each.missing,
                "done": each.done,
            }
            for each in self.columns
        ]

    def sentences(self, most: int = 12) -> list[str]:
        """Return what is done to each column, for a terminal: at most so many lines, left-out columns first."""
        rows = sorted(self.columns, key=lambda each: not each.left_out)
        lines = [f"column {each.name!r}: {each.kind}, {each.done}" for each in rows[:most]]
        lines += [f"and {counted(len(rows) - most, 'more column')}; columns.json in the run's folder has all"] * (
            len(rows) > most
        )
        return [f"{counted(len(rows), 'column')} of the table make {counted(len(self.input_names), 'input')}:", *lines]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        return {"columns": [asdict(each) | {"values": list(each.values)} for each in self.columns]}

    @classmethod
    def from_json(cls, content: Any) -> TablePlan:
        """Return the plan in a file's JSON object; ValueError says in a few words what is wrong with it."""
        rows = content.get("columns") if isinstance(content, dict) else None
        if not isinstance(rows, list) or not 1 <= len(rows) <= _MOST_COLUMNS:
            raise ValueError("its table has no list of columns")
        plan = cls(tuple(map(_column_plan, rows)))
        width = sum(len(each.input_names) for each in plan.used)
        if len(set(plan.names)) < len(plan.used) or not 1 <= width <= _MOST_INPUTS:
            raise ValueError("its table has columns of the same name, or its number of inputs is out of range")
        return plan


def plan_of(content: Any, input_shape: Sequence[int]) -> TablePlan | None:
    """Return the plan in a model's spec, None if it has none; ValueError if it does not fit the model's inputs."""
    if content is None:
        return None
    plan = TablePlan.from_json(content)
    if list(input_shape) != [sum(len(each.input_names) for each in plan.used)]:
        raise ValueError("its table has another number of inputs than its model")
    return plan


def _column_plan(row: Any) -> ColumnPlan:
    """Return the plan of a column from a file; ValueError if it makes no sense."""
    types = {each.name: type(each.default) for each in fields(ColumnPlan) if each.name not in ("name", "kind")}
    if not isinstance(row, dict) or set(row) != {"name", "kind", *types} or row["kind"] not in KINDS:
        raise ValueError("a column of its table has other entries than it should")
    for name, kind in types.items():
        value = row[name]
        right = type(value) in (int, float) if kind is float else isinstance(value, list if kind is tuple else kind)
        if not right or (kind is float and not abs(value) < 1e30):
            raise ValueError(f"the {name} of a column of its table makes no sense")
    texts = (row["name"], *row["values"])
    if not all(isinstance(each, str) for each in texts) or len(row["values"]) > MOST_VALUES or not row["deviation"] > 0:
        raise ValueError("the names, values or deviation of a column of its table make no sense")
    if row["kind"] == DATE and abs(row["mean"]) > 700_000:  # beyond the years that a date can have
        raise ValueError("the mean of a column of dates makes no sense")
    return ColumnPlan(**row | {"values": tuple(row["values"])})


def learn(raw: Sequence[RawColumn], x: Array, rows: Array, owner: Array, name: str) -> TablePlan:
    """Return the plan for a table, learned from some of its rows alone.

    Args:
        raw: the columns of the table.
        x: float64 [N, columns], their raw values.
        rows: int64 [R], the training rows of seen clients.
        owner: int64 [R], the client of each of these rows.
        name: name of the data, for errors.
    """
    plan = TablePlan(tuple(_learn_column(column, x[rows, place], owner) for place, column in enumerate(raw)))
    if not plan.used:
        reasons = ", ".join(f"{each.name!r} ({each.left_out})" for each in plan.columns[:5])
        raise PefllError(
            f"{name}: no column is left to learn from: {reasons}; add columns whose values differ", code="PEFLL-D580"
        )
    return plan


def _learn_column(column: RawColumn, values: Array, owner: Array) -> ColumnPlan:
    present = ~np.isnan(values)
    seen = values[present]
    missing = round(1 - len(seen) / max(1, len(values)), 6)
    indicator = 0 < len(seen) < len(values)
    plan = partial(ColumnPlan, column.name, column.kind, missing=missing)
    if not len(seen):
        return plan(left_out="all its values are missing in training rows")
    if column.kind == CATEGORY:
        kept, others = _frequent_values(column, seen.astype(np.int64), owner[present])
        if not kept and not indicator:
            return plan(left_out="no value is common to several clients")
        if len(kept) + others == 1 and not indicator:
            return plan(left_out="it has one value only in training rows")
        return plan(values=kept, others=others, indicator=indicator)
    if column.kind == TEXT:
        return plan(indicator=indicator)
    if float(seen.min()) == float(seen.max()):
        if not indicator:
            return plan(left_out="it has one value only in training rows")
        return plan(mean=float(seen[0]), indicator=True)
    if column.kind == CALENDAR:
        return plan(hours=bool((seen != np.floor(seen)).any()), indicator=indicator)
    deviation = float(f"{seen.std():.4g}") or 1.0
    # Rounded, so that sums that differ in the last bit, as on another machine, give the same plan.
    mean = round(float(seen.mean()), 4 - math.floor(math.log10(deviation)))
    return plan(mean=mean, deviation=deviation, indicator=indicator)


def _frequent_values(column: RawColumn, codes: Array, owner: Array) -> tuple[tuple[str, ...], bool]:
    """Return the values of a category that get an input each, and whether training rows have other values."""
    count = np.bincount(codes, minlength=len(column.values))
    pairs = np.unique(np.stack([codes, owner], axis=1), axis=0)[:, 0]
    clients = np.bincount(pairs, minlength=len(column.values))
    enough = min(_CLIENTS_PER_VALUE, len(np.unique(owner)))
    ranked = [code for code in np.argsort(-count, kind="stable").tolist() if clients[code] >= enough]
    kept = sorted(ranked[:MOST_VALUES])
    return tuple(column.values[code] for code in kept), int(count[kept].sum()) < len(codes)


def read_column(values: Array, name: str, where: str, rule: str = "") -> tuple[RawColumn, Array]:
    """Return a table's column, and its values as float64 [N] with NaN for missing ones.

    Numbers and booleans stay as they are, dates become days since 1970, and texts become codes.

    Args:
        values: [N] numbers, booleans, dates, texts, or a mixture of one of these with missing values.
        name: name of the column.
        where: name of the table, for errors.
        rule: one of `KINDS`; "" to find out. Dates and long texts need a rule.
    """
    kind = values.dtype.kind
    if kind == "M":
        return _dates(name, values.astype("datetime64[us]").astype(np.float64), np.isnat(values), rule, where)
    if kind in "uif" and rule != CATEGORY:
        if rule not in ("", NUMBER, BOOLEAN):
            raise _wrong_kind(where, name, "numbers", rule)
        return RawColumn(name, rule or NUMBER), values.astype(np.float64)
    if kind == "b" and rule != CATEGORY:
        if rule not in ("", NUMBER, BOOLEAN):
            raise _wrong_kind(where, name, "booleans", rule)
        return RawColumn(name, rule or BOOLEAN), values.astype(np.float64)
    if kind not in "uifbOUS":
        raise _no_values(where, name, str(values.dtype))
    if kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    return _objects(values.tolist(), name, where, rule)


def _objects(values: list[Any], name: str, where: str, rule: str) -> tuple[RawColumn, Array]:
    """Return the column of a list of Python values; see `read_column`."""
    missing = np.fromiter(map(_is_missing, values), dtype=bool, count=len(values))
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
        if rule not in ("", NUMBER, BOOLEAN):
            raise _wrong_kind(where, name, "booleans" if is_boolean else "numbers", rule)
        found = [math.nan if gap else _as_float(value) for value, gap in zip(values, missing, strict=True)]
        return RawColumn(name, rule or (BOOLEAN if is_boolean else NUMBER)), np.asarray(found)
    if texts and rule in (NUMBER, BOOLEAN):
        return RawColumn(name, rule), _numbers_in_texts(values, missing, name, where, rule)
    if texts and (rule in (DATE, CALENDAR) or (not rule and _are_dates(values, missing, _ISO))):
        return _dates(name, _parsed_dates(values, missing, name, where), missing, rule, where)
    if not texts and not all(issubclass(each, str | numbers.Number) for each in types):
        raise _no_values(where, name, " and ".join(sorted(each.__name__ for each in types)[:3]))
    if rule:
        raise _wrong_kind(where, name, "texts", rule)
    return _texts(values, missing, name, where, rule)


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
    if different and all(_LOCAL_DATE.fullmatch(word) for word in different):
        raise PefllError(
            f"{where}: column {name!r} has dates such as {different[0]!r}, which countries read differently; write "
            f"them as 2024-12-31, or {_leave_out(name)}",
            code="PEFLL-D582",
        )
    odd = [word for word in different if not _is_number(word)]
    if len(different) - len(odd) > MOST_VALUES and 0 < len(odd) < len(different) / 2:
        raise PefllError(
            f"{where}: column {name!r} has numbers, but also the text {odd[0]!r}; leave such cells empty if the value "
            f"is missing, or use it as a category with {_treat(name, CATEGORY)}",
            code="PEFLL-D583",
        )
    if len(different) > _MANY_TEXTS or (rows >= _FEW_ROWS and 2 * len(different) > rows):
        raise PefllError(
            f"{where}: column {name!r} has {len(different):,} different texts in {counted(rows, 'row')}, which is no "
            f"category; {_advice(name)}",
            code="PEFLL-D584",
        )


def _dates(name: str, micro: Array, missing: Array, rule: str, where: str) -> tuple[RawColumn, Array]:
    """Return a column of dates, given in microseconds since 1970; PefllError without a rule."""
    if rule not in (DATE, CALENDAR):
        if rule:
            raise _wrong_kind(where, name, "dates", rule)
        raise PefllError(
            f"{where}: column {name!r} has dates; say how to use them: {_treat(name, DATE)} for days (a trend), "
            f"{_treat(name, CALENDAR)} for the time of the year, the week and the day, or {_leave_out(name)}",
            code="PEFLL-D585",
        )
    return RawColumn(name, rule), np.where(missing, np.nan, micro / (_DAY * 1e6))


def _parsed_dates(values: list[Any], missing: Array, name: str, where: str) -> Array:
    """Return texts as microseconds since 1970, float64 [N]; PefllError for a text that is no ISO date."""
    known: dict[str, float] = {}
    for value, gap in zip(values, missing, strict=True):
        if gap or value in known:
            continue
        try:
            if not _ISO.fullmatch(value.strip()):
                raise ValueError
            known[value] = _microseconds(datetime.datetime.fromisoformat(value.strip().replace(",", ".")))
        except ValueError:
            raise PefllError(
                f"{where}: column {name!r} has {value[:40]!r}, which is no date; write dates as 2024-12-31 or "
                "2024-12-31 23:59:00",
                code="PEFLL-D586",
            ) from None
    return np.asarray([0.0 if gap else known[value] for value, gap in zip(values, missing, strict=True)])


def _microseconds(date: datetime.date) -> float:
    """Return the time since 1970; a time without a zone counts as UTC."""
    if not isinstance(date, datetime.datetime):
        return (date - datetime.date(1970, 1, 1)).days * _DAY * 1e6
    zone = datetime.UTC if date.tzinfo is not None else None
    return (date - datetime.datetime(1970, 1, 1, tzinfo=zone)).total_seconds() * 1e6


def _numbers_in_texts(values: list[Any], missing: Array, name: str, where: str, rule: str) -> Array:
    found = np.full(len(values), np.nan)
    for place in np.flatnonzero(~missing).tolist():
        word = values[place].strip()
        if rule == BOOLEAN and word.lower() in (*_TRUE, *_FALSE):
            found[place] = word.lower() in _TRUE
        elif _is_number(word):
            found[place] = float(word)
        else:
            raise PefllError(
                f"{where}: column {name!r} has the text {word[:40]!r} where a number is needed; correct it, or leave "
                "the cell empty if the value is missing",
                code="PEFLL-D587",
            )
    return found


def _is_missing(value: Any) -> bool:
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


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _are_dates(values: list[Any], missing: Array, form: re.Pattern[str]) -> bool:
    return all(gap or form.fullmatch(value.strip()) for value, gap in zip(values, missing, strict=True))


def _calendar_parts(hours: bool) -> list[str]:
    periods = ("year", "week", *(("day",) if hours else ()))
    return [f"{wave} of the {period}" for period in periods for wave in ("sine", "cosine")]


def _waves(days: Array, hours: bool) -> list[Array]:
    """Return sine and cosine of the time of the year, of the week and maybe of the day, each [N]."""
    lengths = (365.2425, 7.0, *((1.0,) if hours else ()))
    angles = [2 * math.pi * (days / length) for length in lengths]
    return [wave(angle) for angle in angles for wave in (np.sin, np.cos)]


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
