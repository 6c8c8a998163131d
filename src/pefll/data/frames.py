"""Samples from tables: CSV files, Parquet files and data frames."""

from __future__ import annotations

import csv
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pefll.core.arguments import listed, shown, text
from pefll.core.errors import PefllError, first_line, unknown
from pefll.core.wording import argument, first_few
from pefll.data.arrays import as_array, samples_from_arrays
from pefll.data.limits import NUMBER, OBJECT, check_growth
from pefll.data.raw_columns import DATE, RawColumn, check_rules, read_column
from pefll.data.raw_columns import NUMBER as NUMBER_KIND
from pefll.data.samples import Array, Samples
from pefll.data.table_plan import TablePlan

CSV = (".csv", ".tsv")
PARQUET = (".parquet", ".pq")
TABLES = (*CSV, *PARQUET)
# Memory that pandas needs to read a CSV, in bytes per cell and per column. Cells that a short line lacks count too.
_CSV_CELL, _CSV_COLUMN = 25, 2_000
_CHUNK = 1 << 20  # bytes


ENCODINGS = ("auto", "none")


class Use(NamedTuple):
    """How the columns of a table are used.

    Attributes:
        features: names of the columns that are features, in order; empty for all other columns.
        drop: names of columns that are left out.
        treat: what a column is, by its name, where the values alone do not say so; see `columns.RULES`.
        encode: "auto" to standardise numbers, to give categories an input per value, and to fill missing values; "none"
            to take all columns as they are. Then they must hold numbers, and none may be missing.
        time: name of the column that orders each client's samples, so that the last become test samples; or "".
    """

    features: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    treat: Mapping[str, str] = {}
    encode: str = "auto"
    time: str = ""


AS_IT_IS = Use()


def use_of(
    features: Sequence[str] = (),
    drop: Sequence[str] = (),
    treat: Mapping[str, str] | None = None,
    encode: str = "auto",
    time: str = "",
) -> Use:
    """Return how columns are used, after checks of a user's arguments."""
    if text(encode, "encode", "auto") not in ENCODINGS:
        raise unknown("encoding", encode, ENCODINGS)
    if treat is not None and not isinstance(treat, Mapping):
        raise PefllError(f"treat is {shown(treat)}; give a dictionary such as {{'joined': 'date'}}", "PEFLL-A580")
    treat = {text(name, "a column"): text(rule, "a rule", "date") for name, rule in (treat or {}).items()}
    if encode == "none" and treat:
        raise PefllError(
            f"{argument('treat')} is of no use with {argument('encode', 'none')}, which encodes nothing; choose one",
            code="PEFLL-D599",
        )
    return Use(tuple(features), tuple(drop), treat, encode, text(time, "time"))


def from_frame(
    frame: Any,
    label: str | Sequence[str],
    client: str | None,
    split: str | None = None,
    features: Sequence[str] | None = None,
    *,
    classes: int | None = None,
    name: str = "frame",
    use: Use = AS_IT_IS,
    labels: str = "auto",
) -> Samples:
    """Return samples from a table with one row per sample.

    Args:
        frame: a pandas or polars data frame, a pyarrow table, or a dictionary of columns.
        label: name of the column of labels; or several names, as a list or with commas between them.
        client: name of the column of clients, or None.
        split: name of the column with train, validation, test; None if the partition chooses the splits.
        features: names of the columns of x, in order; by default those of `use`, or all other columns.
        classes: number of classes; by default the largest label + 1.
        name: name of the data, for errors and records.
        use: how the columns are used.
        labels: what labels are, see `samples_from_arrays`.
    """
    label = joined_names(label)
    label = text(label, "label", "y")
    client, split = (
        None if each is None else text(each, what) for each, what in ((client, "client"), (split, "split"))
    )
    if isinstance(features, str):
        features = (features,)
    elif features is not None:
        features = [text(each, "a feature") for each in listed(features, "features", "['age', 'height']")]
    # Read labels first, so that a missing label column is reported before any error of the features.
    y, label_columns = label_column(frame, label, name), label_names(label, columns(frame))
    if features is not None and not features:
        raise PefllError(f"{name}: there are no feature columns; name some", code="PEFLL-D158")
    chosen = _chosen(frame, tuple(features or use.features), (*label_columns, client, split), use, name)
    owner, splits = (None if each is None else column(frame, each, name) for each in (client, split))
    time = order_of(column(frame, use.time, name), use.time, name) if use.time else None
    if use.encode == "none":
        x = feature_matrix(frame, chosen, name)
        samples = samples_from_arrays(
            x, y, owner, splits, classes, name, feature_names=chosen, labels=labels, label_names=label_columns
        )
    else:
        samples = samples_of_columns(
            frame,
            chosen,
            use.treat,
            y,
            owner,
            splits,
            classes=classes,
            name=name,
            labels=labels,
            label_names=label_columns,
        )
    return replace(samples, label_column=label, client_column=client or "", time=time)


def samples_of_columns(
    frame: Any,
    features: Sequence[str],
    rules: Mapping[str, str],
    y: Any,
    client: Any = None,
    split: Any = None,
    *,
    classes: int | None = None,
    name: str = "frame",
    labels: str = "auto",
    label_names: Sequence[str] = (),
) -> Samples:
    """Return samples with the raw values of a table's columns `features`, which a partition encodes."""
    table, raw = raw_columns(frame, features, rules, name)
    # These zeros take no memory. They stand for the table, whose missing values are no samples yet.
    zeros = np.broadcast_to(np.float32(0), raw.shape)
    samples = samples_from_arrays(
        zeros, y, client, split, classes, name, feature_names=features, labels=labels, label_names=label_names
    )
    return replace(samples, x=raw, table=table)


def _chosen(frame: Any, features: tuple[str, ...], kept: Sequence[str | None], use: Use, name: str) -> tuple[str, ...]:
    """Return the names of the features; PefllError for names that cannot be features."""
    there, special = columns(frame), [each for each in kept if each]
    for each in use.drop:
        if each not in there:
            raise PefllError(
                f"{name}: {argument('drop', each)} names no column; there are {_first_names(there)}: correct the name",
                "PEFLL-D591",
            )
    for each in features:
        if each in special:
            raise PefllError(
                f"{name}: {each!r} is the column of labels, clients or splits; it cannot be a feature: leave it out of "
                f"{argument('features')}",
                code="PEFLL-D592",
            )
        if each in use.drop:
            raise PefllError(f"{name}: {each!r} is both a feature and to be dropped; choose one", code="PEFLL-D593")
    if twice := [each for each, number in Counter(features).items() if number > 1]:
        raise PefllError(f"{name}: {twice[0]!r} is named twice among the features; name it once", code="PEFLL-D594")
    chosen = features or feature_names(frame, (*special, *use.drop, use.time), name)
    check_rules(use.treat, chosen, name)
    return chosen


def raw_columns(
    frame: Any, names: Sequence[str], rules: Mapping[str, str], where: str
) -> tuple[tuple[RawColumn, ...], Array]:
    """Return columns of a table as they are, and their values as float64 [N, columns] with NaN for missing ones."""
    keys = _keys_by_name(frame)
    x, found = None, []
    for place, name in enumerate(names):
        values = _column(frame, keys, name, where)
        if not len(values):
            raise PefllError(f"{where}: there are no samples, only the names of columns", code="PEFLL-D159")
        if x is None:
            x = np.empty((len(values), len(names)))
        if len(values) != len(x):
            raise _of_other_length(where, name, len(values), names[0], len(x))
        one, x[:, place] = read_column(values, name, where, rules.get(name, ""))
        found.append(one)
    if x is None:
        raise PefllError(f"{where}: there are no feature columns; name some", code="PEFLL-D158")
    return tuple(found), x


def _of_other_length(where: str, name: str, entries: int, first: str, others: int) -> PefllError:
    return PefllError(
        f"{where}: column {name!r} has {entries:,} entries, but {first!r} has {others:,}; they must be equal",
        "PEFLL-D005",
    )


def order_of(values: Array, what: str, where: str) -> Array:
    """Return a column of times, given as dates or numbers, as float64 [N]; PefllError for missing times."""
    is_number = values.dtype.kind in "uif"
    times = read_column(values, what, where, rule=NUMBER_KIND if is_number else DATE)[1]
    if np.isnan(times).any():
        raise PefllError(
            f"{where}: column {what!r} has no time in row {int(np.isnan(times).argmax()) + 1:,}, so its client's rows "
            "have no order; fill it in, or leave the row out",
            code="PEFLL-D595",
        )
    return times


def inputs_of(frame: Any, features: Sequence[str], plan: TablePlan | None, name: str, *, tokens: bool = False) -> Array:
    """Return the inputs of a trained model from a table's rows as they are, [N, inputs].

    Args:
        frame: the table. Columns that the model was not trained on are ignored.
        features: names of the columns, in the order of the model; unused with a plan.
        plan: what training did to each column, or None.
        name: name of the table, for errors.
        tokens: whether the columns hold tokens.
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
    return plan.encode(found, name)


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
    parts = [column(frame, each, name) for each in names]
    for each, part in zip(names, parts, strict=True):
        if part.dtype.kind not in "buif":
            raise PefllError(
                f"{name}: the column {each!r} of labels does not hold numbers; with several columns of labels, each "
                "must hold numbers, or 0 and 1",
                code="PEFLL-D506",
            )
    if all(part.dtype.kind == "b" for part in parts):
        return np.stack(parts, axis=1)
    return np.stack([part.astype(np.int64) if part.dtype.kind == "b" else part for part in parts], axis=1)


def has_labels(frame: Any, label: str) -> bool:
    """Return whether a table has all columns of labels that `label` names."""
    there = columns(frame)
    return set(label_names(label, there)) <= set(there)


def feature_names(frame: Any, without: Sequence[str | None], name: str = "frame") -> tuple[str, ...]:
    """Return the names of a table's columns that are not among `without`, in order."""
    left_out = set(without)
    chosen = tuple(each for each in columns(frame) if each not in left_out)
    if not chosen:
        raise PefllError(
            f"{name}: there are no feature columns beside {', '.join(each for each in without if each)}; add some",
            code="PEFLL-D157",
        )
    return chosen


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
    if missing:
        raise PefllError(
            f"{name} has no column {first_few(map(repr, missing))}, which the model was trained on; it has "
            f"{first_few(map(repr, there), 20) or 'none at all'}",
            code="PEFLL-M030",
        )
    twice = [each for each in features if there[each] > 1]
    if twice:
        raise PefllError(
            f"{name} has the column {first_few(map(repr, twice))} more than once; rename or drop one",
            code="PEFLL-M031",
        )


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


def index_levels(frame: Any) -> list[str | None]:
    """Return the names of the levels of a pandas index; an empty list for other tables."""
    levels = () if isinstance(frame, dict) else getattr(getattr(frame, "index", None), "names", None)
    return [None if level is None else str(level) for level in levels or ()]


def _keys_by_name(frame: Any) -> dict[str, Any]:
    """Return the key of each column of a table, by the column's name."""
    return {str(key): key for key in _keys(frame)}


def _column(frame: Any, keys: dict[str, Any], name: str, where: str) -> Array:
    if name not in keys:
        raise PefllError(f"{where}: there is no column {name!r}; there are {_first_names(keys)}", "PEFLL-M054")
    given = frame[keys[name]]
    values = as_array(given, f"column {name!r}", where)
    if values.dtype.kind == "U" and isinstance(given, list | tuple):
        values = np.asarray(given, dtype=object)  # NumPy turned missing values among texts into the text "nan"
    if values.ndim != 1:
        reason = "there are several columns of that name" if values.ndim == 2 else "it holds no single values"
        raise PefllError(f"{where}: column {name!r} cannot be used: {reason}; give each its own name", "PEFLL-D006")
    return values


def _first_names(names: Iterable[str], most: int = 50) -> str:
    """Return the first `most` names, for an error sentence."""
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most:,} more" if len(known) > most else "")


def read_frame(path: Path) -> Any:
    """Return the table in a CSV or Parquet file as a pandas data frame."""
    parquet = path.suffix.lower() in PARQUET
    what = "Parquet" if parquet else "CSV"
    try:
        import pandas

        if parquet:
            import pyarrow.compute
            import pyarrow.parquet
    except ImportError:
        needs = "pandas and pyarrow" if parquet else "pandas"
        raise PefllError(f"reading {what} needs {needs}: pip install 'pefll[files]'", code="PEFLL-D162") from None
    try:
        if parquet:
            return _read_parquet(path, pyarrow)
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        _check_csv(path, separator)
        return pandas.read_csv(path, sep=separator, low_memory=False)
    except UnicodeDecodeError:
        raise PefllError(
            f"{path} is not UTF-8; if it is Latin-1, as older spreadsheets write it, convert it: "
            f"iconv -f latin1 -t utf-8 {shlex.quote(path.name)} > utf8.csv",
            code="PEFLL-D597",
        ) from None
    except (OSError, ValueError, KeyError, EOFError, OverflowError, MemoryError, RecursionError, csv.Error) as error:
        reason = first_line(error).strip()
        raise PefllError(f"{path} cannot be read as {what}: {reason}; save it again", code="PEFLL-D163") from None


def _check_csv(path: Path, separator: str) -> None:
    """Raise PefllError for a CSV that needs too much memory: pandas fills short lines up to the full width."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as text_file:
        heading = text_file.readline(1 << 20)
        other = next((mark for mark in ";\t|" if mark in heading and separator not in heading), "")
        if other and separator == ",":
            raise PefllError(
                f"{path} separates its cells by {other!r}, not by commas; save it with commas, for example: "
                f"pandas.read_csv({path.name!r}, sep={other!r}).to_csv('commas.csv', index=False), adding decimal=',' "
                "if numbers have decimal commas",
                code="PEFLL-D596",
            )
        text_file.seek(0)
        filled = (row for row in csv.reader(text_file, delimiter=separator) if len(row) > 1 or "".join(row).strip())
        # If the first line of values is longer than the line of names, pandas adds columns.
        width = max((len(row) for row in islice(filled, 2)), default=0)
    lines = 1
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            lines += chunk.count(b"\n") + chunk.count(b"\r") - chunk.count(b"\r\n")
    check_growth(str(path), path.stat().st_size, width * (_CSV_COLUMN + _CSV_CELL * lines))


def _read_parquet(path: Path, pyarrow: Any) -> Any:
    """Return the table in a Parquet file; PefllError if the table would take too much memory."""
    stored, needed, texts = path.stat().st_size, 0, []
    about = pyarrow.parquet.read_metadata(path)
    for place, field in enumerate(about.schema.to_arrow_schema()):
        kind = field.type
        while isinstance(kind, pyarrow.BaseExtensionType | pyarrow.DictionaryType):
            kind = kind.value_type if isinstance(kind, pyarrow.DictionaryType) else kind.storage_type
        if pyarrow.types.is_nested(kind):
            raise PefllError(
                f"{path.name}: column {field.name!r} does not hold numbers; turn it into numbers or leave it out",
                code="PEFLL-D160",
            )
        if _is_text(pyarrow.types, kind):
            texts.append(field.name)
        # Dates, times and decimal numbers become Python objects, like texts.
        is_number = pyarrow.types.is_primitive(kind) and not (
            pyarrow.types.is_date(kind) or pyarrow.types.is_time(kind)
        )
        width = kind.byte_width if pyarrow.types.is_fixed_size_binary(kind) else 0
        for group in map(about.row_group, range(about.num_row_groups)):
            part = group.column(place)  # `place` is right because no column is nested; equal values take few bytes
            rows = max(part.num_values, group.num_rows, 0)
            needed += max(part.total_uncompressed_size, rows * (NUMBER if is_number else OBJECT + width))
    check_growth(str(path), stored, needed)
    # The file stores equal texts once. So does a dictionary array, so that the full size can be checked first.
    table = pyarrow.parquet.read_table(path, read_dictionary=texts)
    for chunk in (chunk for column in table.columns for chunk in column.chunks):
        if isinstance(chunk, pyarrow.DictionaryArray) and _is_text(pyarrow.types, chunk.dictionary.type):
            lengths = pyarrow.compute.binary_length(chunk.dictionary).cast("int64").take(chunk.indices)
            needed += pyarrow.compute.sum(lengths).as_py() or 0
    check_growth(str(path), stored, needed)
    return table.to_pandas()


def _is_text(types: Any, kind: Any) -> bool:
    """Return whether the pyarrow type `kind` has texts or bytes of any length; `types` is `pyarrow.types`."""
    asked = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(is_kind(kind) for is_kind in asked)
