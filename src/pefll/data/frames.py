"""Tables with named columns: data frames, pyarrow tables, dictionaries; their columns, labels and features."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pefll.core.arguments import shown, text
from pefll.core.errors import PefllError, closest
from pefll.core.wording import argument, counted, first_few, similar
from pefll.data.arrays import as_array
from pefll.data.missing_labels import are_truths, as_names, as_numbers, has_label
from pefll.data.raw_columns import (
    CATEGORY,
    SUGGESTED,
    BadCell,
    RawColumn,
    all_unclear,
    read_column,
    refuse_cell,
    refuse_unread,
)
from pefll.data.samples import Array
from pefll.data.table_plan import TablePlan

_MOST_ASKED, _MOST_COMPARED = 5, 1_000  # missing columns to suggest another name for; other columns to look at
# How pandas names the index of a CSV, and an index that was written twice.
_ROW_NUMBERS = re.compile(r"Unnamed: 0(\.\d+)?")
# What `str` gives for missing values.
_EMPTY = ("None", "nan", "<NA>", "NaT")


def inputs_of(
    frame: Any,
    features: Sequence[str],
    plan: TablePlan | None,
    name: str,
    *,
    tokens: bool = False,
    bad: BadCell = refuse_cell,
    several: bool = False,
) -> Array:
    """Return the inputs of a trained model from a table's rows as they are, [N, inputs].

    Args:
        frame: the table. Columns that the model was not trained on are ignored.
        features: names of the columns, in the order of the model; unused with a plan.
        plan: what training did to each column, or None.
        name: name of the table, for errors.
        tokens: whether the columns hold tokens.
        bad: called for each cell that a plan cannot read, see `read_column`.
        several: whether the rows are of several clients.
    """
    if plan is None:
        return matrix_by_name(frame, features, name, tokens=tokens)
    check_columns(frame, plan.names, name)
    keys = _keys_by_name(frame)
    found = {each: _column(frame, keys, each, name) for each in plan.names}
    first = plan.names[0]
    for each, values in found.items():
        if len(values) != len(found[first]):
            raise _of_other_length(name, each, len(values), first, len(found[first]))
    if not len(found[first]):
        raise PefllError(f"{name}: there are no samples, only the names of columns", code="PEFLL-D159")
    return plan.encode(found, name, bad, several=several)


def raw_columns(
    frame: Any, names: Sequence[str], rules: Mapping[str, str], where: str, *, has_clients: bool = True
) -> tuple[tuple[RawColumn, ...], Array]:
    """Return columns of a table as they are, and their values as float64 [N, columns] with NaN for missing ones.

    Args:
        frame: the table.
        names: names of the columns.
        rules: what a column is, by its name, where the values alone do not say so.
        where: name of the table, for errors.
        has_clients: whether the client of each row is known; if not, an error about texts says how to name it.
    """
    keys = _keys_by_name(frame)
    x, found = None, []
    unclear: dict[str, PefllError] = {}
    for place, name in enumerate(names):
        values = _column(frame, keys, name, where)
        if not len(values):
            raise PefllError(f"{where}: there are no samples, only the names of columns", code="PEFLL-D159")
        if x is None:
            x = np.empty((len(values), len(names)))
        if len(values) != len(x):
            raise _of_other_length(where, name, len(values), names[0], len(x))
        try:
            is_code = values.dtype.kind in "uifb" and _is_categorical(frame[keys[name]])
            one, x[:, place] = read_column(values, name, where, rules.get(name, CATEGORY if is_code else ""))
            found.append(one)
        except PefllError as error:
            if error.code not in SUGGESTED:
                raise
            if error.code == "PEFLL-D584" and not has_clients:
                error = _may_name_clients(error, name)
            unclear[name] = error
    if x is None:
        raise PefllError(f"{where}: there are no feature columns; name some", code="PEFLL-D158")
    if unclear:
        raise all_unclear(unclear)
    return tuple(found), x


def _may_name_clients(error: PefllError, name: str) -> PefllError:
    """Return the error for a column with many texts, and what to do if these are names of clients."""
    given = argument("client", name, option="--client-column")
    return PefllError(f"{error.args[0]}; if it names the client of each row, give it with {given}", error.code)


def _is_categorical(values: Any) -> bool:
    """Return whether pandas says that a column's values are categories."""
    return str(getattr(values, "dtype", "")) == "category"


def joined_names(label: Any) -> Any:
    """Return several names as one text with commas between them; other values unchanged."""
    listed_names = isinstance(label, list | tuple)
    return ",".join(text(each, "label", "y") for each in label) if listed_names else label


def label_names(label: str, there: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of labels that `label` names: one column of `there`, or several with commas between them."""
    return (label,) if label in there or "," not in label else tuple(each.strip() for each in label.split(","))


def label_column(frame: Any, label: str, name: str) -> Array:
    """Return the labels of a table, [N], or [N, k] if `label` names several columns."""
    names = label_names(label, columns(frame))
    if len(names) == 1:
        return column(frame, names[0], name)
    if twice := [each for each, number in Counter(names).items() if number > 1]:
        raise PefllError(f"{name}: {twice[0]!r} is named twice among the labels; name it once", code="PEFLL-D679")
    parts = [column(frame, each, name) for each in names]
    if all(map(are_truths, parts)):
        return np.stack(parts, axis=1)
    parts = [as_numbers(part) for part in parts]
    for each, part in zip(names, parts, strict=True):
        if part.dtype.kind not in "buif":
            raise PefllError(
                f"{name}: the column {each!r} of labels does not hold numbers; with several columns of labels, each "
                "must hold numbers, or 0 and 1",
                code="PEFLL-D506",
            )
    return np.stack([part.astype(np.int64) if part.dtype.kind == "b" else part for part in parts], axis=1)


def labels_in(frame: Any, label: str, name: str, class_names: Sequence[str] = ()) -> Array | None:
    """Return the labels of a table as `label_column` does; None if it lacks such a column, or has no label in it.

    If classes have `class_names`, labels are texts: 1 and True are "1" and "True", whatever the number of this class.
    """
    there = columns(frame)
    names = label_names(label, there)
    if not set(names) <= set(there):
        return None
    by_name = class_names and len(names) == 1
    y = as_names(column(frame, names[0], name)) if by_name else label_column(frame, label, name)
    return y if has_label(y).any() else None


def why_no_labels(frame: Any, label: str) -> str:
    """Return why `labels_in` finds no labels in a table, in a few words that go on after the table's name."""
    there = columns(frame)
    absent = [each for each in label_names(label, there) if each not in there]
    if absent:
        return f"has no column{'s' * (len(absent) > 1)} {first_few(map(repr, absent))} of labels"
    return f"has no row with a label in {first_few(map(repr, label_names(label, there)))}"


def feature_names(frame: Any, without: Sequence[str | None], name: str = "frame") -> tuple[str, ...]:
    """Return the names of a table's columns that are not among `without`, in order; row numbers are left out, too.

    pandas writes a frame's index as a column without a name. It often tells the order of clients, and is in no table
    of a new client.
    """
    left_out = set(without)
    chosen = [each for each in columns(frame) if each not in left_out]
    chosen = [each for each in chosen if not (_ROW_NUMBERS.fullmatch(each) and _is_whole(frame, each, name))] or chosen
    if not chosen:
        raise PefllError(
            f"{name}: there are no feature columns beside {', '.join(each for each in without if each)}; add some",
            code="PEFLL-D157",
        )
    return tuple(chosen)


def _is_whole(frame: Any, each: str, name: str) -> bool:
    """Return whether a column holds whole numbers."""
    return column(frame, each, name).dtype.kind in "iu"


def feature_matrix(frame: Any, features: Sequence[str], name: str = "frame", *, tokens: bool = False) -> Array:
    """Return the columns `features` in this order, float32 [N, features], or int64 for tokens."""
    if not features:
        raise PefllError(f"{name}: there are no feature columns; name some", code="PEFLL-D158")
    keys = _keys_by_name(frame)  # only once, because once per column would take quadratic time
    first = _column(frame, keys, features[0], name)
    if not len(first):
        raise PefllError(f"{name}: there are no samples, only the names of columns", code="PEFLL-D159")
    # Convert one column at a time, because a float64 copy of a wide table would need much memory.
    x = np.empty((len(first), len(features)), dtype=np.int64 if tokens else np.float32)
    for place, each in enumerate(features):
        values = _column(frame, keys, each, name)
        if len(values) != len(x):
            raise _of_other_length(name, each, len(values), features[0], len(x))
        if values.dtype.kind not in "uif":
            raise PefllError(
                f"{name}: column {each!r} does not hold numbers; turn it into numbers or leave it out",
                code="PEFLL-D160",
            )
        if tokens and values.dtype.kind == "f":
            raise PefllError(
                f"{name}: column {each!r} is {values.dtype}; tokens must be whole numbers", code="PEFLL-D161"
            )
        with np.errstate(over="ignore"):
            x[:, place] = values
    return x


def _of_other_length(where: str, name: str, entries: int, first: str, others: int) -> PefllError:
    return PefllError(
        f"{where}: column {name!r} has {entries:,} entries, but {first!r} has {others:,}; they must be equal",
        "PEFLL-D005",
    )


def is_frame(values: Any) -> bool:
    """Return whether a value is a table with named columns."""
    return isinstance(values, dict) or hasattr(values, "columns") or hasattr(values, "column_names")


def matrix_by_name(frame: Any, features: Sequence[str], name: str = "frame", *, tokens: bool = False) -> Array:
    """Return the columns `features`, on which a model was trained, as a `feature_matrix` in the model's order.

    Other columns are ignored. Raise PefllError for missing or duplicate columns.
    """
    check_columns(frame, features, name)
    return feature_matrix(frame, features, name, tokens=tokens)


def check_columns(frame: Any, features: Sequence[str], name: str) -> None:
    """Raise PefllError if a table lacks a column that a model was trained on, or has it twice."""
    there = Counter(columns(frame))
    missing = [each for each in features if not there[each]]
    several = len(missing) > 1
    if missing:
        raise PefllError(
            f"{name} has no column{'s' * several} {first_few(map(repr, missing))}, which the model was trained on; "
            f"{_meant(missing, there.keys() - set(features))}add {'them' if several else 'it'}, or rename the "
            f"column{'s' * several} with {'their' if several else 'its'} values, of "
            f"{first_few(map(repr, there)) or 'none at all'}",
            code="PEFLL-M030",
        )
    twice = [each for each in features if there[each] > 1]
    if twice:
        raise PefllError(
            f"{name} has the column {first_few(map(repr, twice))} more than once; rename or drop one",
            code="PEFLL-M031",
        )


def _meant(missing: Sequence[str], others: Iterable[str]) -> str:
    """Return a question whether other columns of a table are the missing ones, by their names; "" if none seems so."""
    others = sorted(others)[:_MOST_COMPARED]
    found = {each: similar(each, others) or closest(each, others) for each in missing[:_MOST_ASKED]}
    words = [repr(near) + f" for {each!r}" * (len(missing) > 1) for each, near in found.items() if near]
    return f"did you mean {first_few(words)}? " if words else ""


def columns(frame: Any) -> list[str]:
    """Return the names of a table's columns."""
    return [str(each) for each in _keys(frame)]


def _keys(frame: Any) -> list[Any]:
    """Return the keys of a table's columns. In pandas, keys may be numbers."""
    # A pyarrow table has both attributes, but its `columns` holds values, not names.
    names = getattr(frame, "column_names", getattr(frame, "columns", frame if isinstance(frame, dict) else None))
    if names is None:
        raise PefllError(
            f"{shown(frame)} is not a table with named columns; give a data frame or a dictionary of columns",
            code="PEFLL-A020",
        )
    return list(names)


def column(frame: Any, name: str, where: str) -> Array:
    """Return one column of a table, [N]."""
    return _column(frame, _keys_by_name(frame), name, where)


def find_column(frame: Any, name: str, where: str) -> Array | None:
    """Return the column or the level of a pandas index with this name, [N]; None if there is neither."""
    if name in columns(frame):
        return column(frame, name, where)
    levels = index_levels(frame)
    if name not in levels:
        return None
    return as_array(frame.index.get_level_values(levels.index(name)), f"index {name!r}", where)


def check_owners(owners: Array, column: str, name: str) -> None:
    """Raise PefllError if a table's column of clients [N] does not name the client of each row."""
    empty = without_owner(owners)
    if len(empty):
        raise PefllError(
            f"{name}: column {column!r} names no client in {len(empty):,} of {counted(len(owners), 'row')}, the first "
            f"of which is row {empty[0] + 1:,}; fill them in, or leave these rows out",
            code="PEFLL-D111",
        )


def without_owner(owners: Any) -> list[int]:
    """Return the rows of a column of clients that name no client. An empty text is a name."""
    values = np.asarray(owners)
    if values.dtype.kind in "iubUS":
        return []
    found = enumerate(values.reshape(-1).tolist())
    return [row for row, value in found if not isinstance(value, str) and str(value) in _EMPTY]


def index_of(frame: Any) -> Any:
    """Return the index of a pandas data frame; None for other tables."""
    index = None if isinstance(frame, dict) else getattr(frame, "index", None)
    return index if hasattr(index, "names") else None


def index_levels(frame: Any) -> list[str | None]:
    """Return the names of the levels of a pandas index; an empty list for other tables."""
    levels = getattr(index_of(frame), "names", None)
    return [None if level is None else str(level) for level in levels or ()]


def _keys_by_name(frame: Any) -> dict[str, Any]:
    """Return the key of each column of a table, by the column's name."""
    return {str(key): key for key in _keys(frame)}


def _column(frame: Any, keys: dict[str, Any], name: str, where: str) -> Array:
    if name not in keys:
        raise PefllError(f"{where}: there is no column {name!r}; there are {first_names(keys)}", "PEFLL-M054")
    given = frame[keys[name]]
    values = as_array(given, f"column {name!r}", where)
    refuse_unread(values, name, where)
    if values.dtype.kind == "U" and isinstance(given, list | tuple):
        values = np.asarray(given, dtype=object)  # NumPy turned missing values among texts into the text "nan"
    if values.ndim != 1:
        reason = "there are several columns of that name" if values.ndim == 2 else "it holds no single values"
        raise PefllError(f"{where}: column {name!r} cannot be used: {reason}; give each its own name", "PEFLL-D006")
    return values


def first_names(names: Iterable[str], most: int = 50) -> str:
    """Return the first `most` names, for an error sentence."""
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most:,} more" if len(known) > most else "")
