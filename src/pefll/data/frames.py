"""Samples from tables: CSV files, Parquet files and data frames."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.arguments import listed, shown, text
from pefll.core.errors import PefllError, first_line
from pefll.core.wording import first_few
from pefll.data.arrays import as_array, samples_from_arrays
from pefll.data.federation import Array, Samples
from pefll.data.limits import NUMBER, OBJECT, check_growth

CSV = (".csv", ".tsv")
PARQUET = (".parquet", ".pq")
TABLES = (*CSV, *PARQUET)
# Memory that pandas needs to read a CSV, in bytes per cell and per column. Cells that a short line lacks count too.
_CSV_CELL, _CSV_COLUMN = 25, 2_000
_CHUNK = 1 << 20  # bytes


def from_frame(
    frame: Any,
    label: str | Sequence[str],
    client: str | None,
    split: str | None = None,
    features: Sequence[str] | None = None,
    *,
    classes: int | None = None,
    name: str = "frame",
    labels: str = "auto",
) -> Samples:
    """Return samples from a table with one row per sample.

    Args:
        frame: a pandas or polars data frame, a pyarrow table, or a dictionary of columns.
        label: name of the column of labels; or several names, as a list or with commas between them.
        client: name of the column of clients, or None.
        split: name of the column with train, validation, test; None if the partition chooses the splits.
        features: names of the columns of x, which hold numbers, in order; by default all other columns.
        classes: number of classes; by default the largest label + 1.
        name: name of the data, for errors and records.
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
    chosen = feature_names(frame, (*label_columns, client, split), name) if features is None else tuple(features)
    samples = samples_from_arrays(
        feature_matrix(frame, chosen, name),
        y,
        client=None if client is None else column(frame, client, name),
        split=None if split is None else column(frame, split, name),
        classes=classes,
        name=name,
        feature_names=chosen,
        labels=labels,
        label_names=label_columns,
    )
    return replace(samples, label_column=label, client_column=client or "")


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
            raise PefllError(
                f"{name}: column {each!r} has {len(values):,} entries, but {features[0]!r} has {len(x):,}", "PEFLL-D005"
            )
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
    return feature_matrix(frame, features, name, tokens=tokens)


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
    values = as_array(frame[keys[name]], f"column {name!r}", where)
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
    except (OSError, ValueError, KeyError, EOFError, OverflowError, MemoryError, RecursionError, csv.Error) as error:
        reason = first_line(error).strip()
        raise PefllError(f"{path} cannot be read as {what}: {reason}; save it again", code="PEFLL-D163") from None


def _check_csv(path: Path, separator: str) -> None:
    """Raise PefllError for a CSV that needs too much memory: pandas fills short lines up to the full width."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as text_file:
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
