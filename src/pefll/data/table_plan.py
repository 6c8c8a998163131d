"""What is done to a table before networks get it, stored as JSON with a run and with every personal model.

So whoever has the model can use rows as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.warning import warn
from pefll.core.wording import counted, first_few
from pefll.data.column_plan import CLIP, ColumnPlan, column_plan_of
from pefll.data.limits import check_fits
from pefll.data.raw_columns import BOOLEAN, DECIMAL_COMMA, NUMBER, Array, BadCell, RawColumn, read_column, refuse_cell

# Limits of a plan in a file, which may come from a stranger.
_MOST_COLUMNS, _MOST_INPUTS = 100_000, 1 << 20
_INPUT = 4  # bytes


class Encoded(np.ndarray[Any, Any]):
    """Inputs that a `TablePlan` made, [N, inputs]. So they are not mistaken for raw values."""


def encoded(x: Array) -> Encoded:
    """Return an array, marked as encoded inputs."""
    return np.asarray(x).view(Encoded)


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
    def width(self) -> int:
        """The number of inputs."""
        return sum(len(each.input_names) for each in self.used)

    def _check_fits(self, name: str, rows: int) -> None:
        """Raise PefllError if the inputs of a table do not fit into memory: a category of one byte has 32 inputs."""
        check_fits(f"{name}, as {rows:,} rows of {self.width:,} inputs,", 2 * rows * self.width * _INPUT)

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
        self._check_fits("the table", len(x))
        whole = np.empty((len(x), self.width), dtype=np.float32)
        start = 0
        for place, (plan, column) in enumerate(zip(self.columns, raw, strict=True)):
            if not plan.left_out:
                part = plan.inputs(x[:, place], column.values)
                whole[:, start : start + part.shape[1]] = part
                start += part.shape[1]
        return whole

    def encode(
        self, columns: Mapping[str, Array], name: str, bad: BadCell = refuse_cell, *, several: bool = False
    ) -> Array:
        """Return the inputs float32 [N, inputs] of a new table's columns, each [N]; errors call the table `name`.

        Infinite values give NaN. `bad` is called for each cell that cannot be read, see `read_column`. `several` says
        whether the rows are of several clients. A warning says which columns are far from those of training.
        """
        self._check_fits(name, max((len(columns[plan.name]) for plan in self.used), default=0))
        parts, far = [], []
        for plan in self.used:
            column, values = read_column(columns[plan.name], plan.name, name, plan.kind, bad)
            far.append(plan.far_off(values, several))
            parts.append(plan.inputs(values, column.values))
        if any(far):
            warn(
                f"{name}: values are far from those that training saw: {first_few(filter(None, far), 3)}; check the "
                "units, because the model cannot tell such values apart"
            )
        return encoded(np.concatenate(parts, axis=1))

    def encode_array(self, x: Array, name: str) -> Array:
        """Return the inputs float32 [N, inputs] of raw values x, [N, columns], in the order of the training table.

        Only a table of numbers has such an array.
        """
        words = [each.name for each in self.columns if each.kind not in (NUMBER, BOOLEAN, DECIMAL_COMMA)]
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
        """Return a row per column: its kind, number of inputs, share of missing values, and what is done to it.

        `pefll.data.columns_report` also has the labels.
        """
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
        plan = cls(tuple(map(column_plan_of, rows)))
        if len(set(plan.names)) < len(plan.used) or not 1 <= plan.width <= _MOST_INPUTS:
            raise ValueError("its table has columns of the same name, or its number of inputs is out of range")
        return plan


def plan_of(content: Any, input_shape: Sequence[int]) -> TablePlan | None:
    """Return the plan in a model's spec, None if it has none; ValueError if it does not fit the model's inputs."""
    if content is None:
        return None
    plan = TablePlan.from_json(content)
    if list(input_shape) != [plan.width]:
        raise ValueError("its table has another number of inputs than its model")
    return plan
