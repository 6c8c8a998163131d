"""What is done to one column of a table: the inputs of networks that it becomes."""

from __future__ import annotations

import datetime
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pefll.core.wording import counted
from pefll.data.raw_columns import CALENDAR, CATEGORY, DATE, DECIMAL_COMMA, KINDS, MOST_VALUES, NUMBER, TEXT, Array

# Standardised values are cut here, so that no row can spoil a model, and raw values are recognised.
CLIP = 10.0
# A column is far off if its median is this many deviations from its mean in training: then most values are cut. One
# client's values may well be cut, such as those of a rare flag, but not by this much.
_FAR, _FAR_FOR_ONE = CLIP, 10 * CLIP
# Or if the mean was clearly not 0, and values are this much smaller: another unit.
_CLEAR, _SMALLER = 3.0, 100.0
_ENOUGH, _SAMPLES = 5, 20_000  # least values for the latter; most values that are looked at
# Or if so many values of several clients have a spread of less than a fiftieth, so that cents show in place of euros,
# and about the same mean relative to it, so that a day of a year does not; or if more than a quarter of them are cut.
_MANY, _NARROWER, _SAME_SHAPE, _CUT = 100, 50.0, 0.5, 0.25
_TAILS = 3.0  # the spread is chance if it is so many times the distance of the quartiles: heavy tails, rare flags
# Words of texts are counted in this many inputs, by their hash.
_BUCKETS = 32


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
            words = f"days, standardised with mean {_day(self.mean)} and deviation {self.deviation:g} days"
        else:
            words = "read with decimal commas, " if self.kind == DECIMAL_COMMA else ""
            words += f"standardised with mean {self.mean:g} and deviation {self.deviation:g}"
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

    def far_off(self, values: Array, several: bool) -> str:
        """Return how new raw values [N] are far from those of training, in a few words; "" if they are not.

        `several` says whether the values are of several clients.
        """
        there = values[np.isfinite(values)]
        there = there[:: max(1, len(there) // _SAMPLES)]
        if self.kind not in (NUMBER, DECIMAL_COMMA, DATE) or not len(there):
            return ""
        middle, size = float(np.median(there)), float(np.median(np.abs(there)))
        far = abs(middle - self.mean) > (_FAR if several else _FAR_FOR_ONE) * self.deviation
        is_small = abs(self.mean) > _CLEAR * self.deviation and 0 < size < abs(self.mean) / _SMALLER
        other_scale = several and self.kind != DATE and self._has_other_scale(there)
        if not far and not (is_small and len(there) >= _ENOUGH) and not other_scale:
            return ""
        if self.kind == DATE:
            return f"{self.name!r} (median {_day(middle)}, in training {_day(self.mean)} ± {self.deviation:.3g} days)"
        return f"{self.name!r} (median {middle:.3g}, in training {self.mean:.3g} ± {self.deviation:.3g})"

    def _has_other_scale(self, there: Array) -> bool:
        """Return whether values [N] of several clients look like those of training in another unit."""
        if len(there) < _MANY:
            return False
        with np.errstate(over="ignore"):  # values of 1e300 have an infinite spread
            spread, (low, high) = float(there.std()), np.quantile(there, [0.25, 0.75])
        if 0 < spread < min(self.deviation / _NARROWER, _TAILS * (high - low)):
            shape = self.mean / self.deviation
            return abs(float(there.mean()) / spread - shape) < _SAME_SHAPE * max(1.0, abs(shape))
        return float((np.abs(there - self.mean) > CLIP * self.deviation).mean()) > _CUT

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


def column_plan_of(row: Any) -> ColumnPlan:
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


def _day(days: float) -> str:
    """Return the date that is this many days after the start of 1970; their number for years beyond 1 to 9999."""
    try:
        return str(datetime.date(1970, 1, 1) + datetime.timedelta(days=days))
    except OverflowError:
        return f"{days:.3g} days after 1970"


def _calendar_parts(hours: bool) -> list[str]:
    periods = ("year", "week", *(("day",) if hours else ()))
    return [f"{wave} of the {period}" for period in periods for wave in ("sine", "cosine")]


def _waves(days: Array, hours: bool) -> list[Array]:
    """Return sine and cosine of the time of the year, of the week and maybe of the day, each [N]."""
    lengths = (365.2425, 7.0, *((1.0,) if hours else ()))
    angles = [2 * math.pi * (days / length) for length in lengths]
    return [wave(angle) for angle in angles for wave in (np.sin, np.cos)]
