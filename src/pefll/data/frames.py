"""Samples from tables: CSV, Parquet, and any data-frame-like object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.arguments import listed, shown, text
from pefll.core.errors import PefllError, first_line
from pefll.core.wording import first_few
from pefll.data.arrays import as_array, samples_from_arrays
from pefll.data.federation import Array, Samples
from pefll.data.limits import check_growth

CSV = (".csv", ".tsv")
PARQUET = (".parquet", ".pq")
TABLES = (*CSV, *PARQUET)


def from_frame(
    frame: Any,
    label: str,
    client: str | None,
    split: str | None = None,
    features: Sequence[str] | None = None,
    *,
    classes: int | None = None,
    name: str = "frame",
) -> Samples:
    """Return samples from a table with one row per sample.

    Args:
        frame: a pandas or polars data frame, a pyarrow table, or a dictionary of columns.
        label: the column of labels.
        client: the column of clients, or None.
        split: the column with train, validation, test; None to let the partition split.
        features: the columns of numbers that make up x, in order; by default all others.
        classes: the number of classes; by default the largest label + 1.
        name: of the data, for errors and records.
    """
    label = text(label, "label", "y")
    client, split = (
        None if each is None else text(each, what) for each, what in ((client, "client"), (split, "split"))
    )
    if isinstance(features, str):
        features = (features,)
    elif features is not None:
        features = [text(each, "a feature") for each in listed(features, "features", "['age', 'height']")]
    # First: a missing label column is an error before features are chosen.
    labels = column(frame, label, name)
    chosen = feature_names(frame, (label, client, split), name) if features is None else tuple(features)
    samples = samples_from_arrays(
        feature_matrix(frame, chosen, name),
        labels,
        client=None if client is None else column(frame, client, name),
        split=None if split is None else column(frame, split, name),
        classes=classes,
        name=name,
        feature_names=chosen,
    )
    return replace(samples, label_column=label, client_column=client or "")


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
    """Return the named columns in this order, float32 [N, features], or int64 for tokens."""
    if not features:
        raise PefllError(f"{name}: there are no feature columns; name some", code="PEFLL-D158")
    keys = _keys_by_name(frame)  # once: per column it would take quadratic time
    first = _column(frame, keys, features[0], name)
    if not len(first):
        raise PefllError(f"{name}: there are no samples, only the names of columns", code="PEFLL-D159")
    # Column by column: a float64 copy of a wide table would need much memory.
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
    """Return whether something is a table with named columns."""
    return isinstance(values, dict) or hasattr(values, "columns") or hasattr(values, "column_names")


def matrix_by_name(frame: Any, features: Sequence[str], name: str = "frame", *, tokens: bool = False) -> Array:
    """Return the columns that a model was trained on as a `feature_matrix`, in the model's order.

    Other columns are ignored. PefllError names columns that are missing or duplicated.
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
    """Return the keys of a table's columns, which in pandas may be numbers."""
    # pyarrow tables have both attributes; their `columns` are values.
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
    """Return a column, [N], or a level of a pandas index with that name; None if there is neither."""
    if name in columns(frame):
        return column(frame, name, where)
    index = getattr(frame, "index", None)
    levels = [] if isinstance(frame, dict) else list(getattr(index, "names", None) or [])
    place = next((place for place, level in enumerate(levels) if level is not None and str(level) == name), None)
    if index is None or place is None:
        return None
    return as_array(index.get_level_values(place), f"index {name!r}", where)


def _keys_by_name(frame: Any) -> dict[str, Any]:
    """Return the keys of a table's columns by name."""
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
    """Return the first names of columns, for a sentence."""
    known = list(names)
    return ", ".join(known[:most]) + (f" and {len(known) - most:,} more" if len(known) > most else "")


def read_frame(path: Path) -> Any:
    """Return the table in a CSV or Parquet file as a pandas data frame."""
    parquet = path.suffix.lower() in PARQUET
    what = "Parquet" if parquet else "CSV"
    try:
        import pandas

        if parquet:
            import pyarrow.parquet  # else the error of pandas lists several engines
    except ImportError:
        needs = "pandas and pyarrow" if parquet else "pandas"
        raise PefllError(f"reading {what} needs {needs}: pip install 'pefll[files]'", code="PEFLL-D162") from None
    try:
        if parquet:
            about = pyarrow.parquet.read_metadata(path)
            # A constant column takes few bytes in the file.
            check_growth(str(path), path.stat().st_size, 8 * about.num_rows * about.num_columns)
            return pandas.read_parquet(path, engine="pyarrow")
        return pandas.read_csv(path, sep="\t" if path.suffix.lower() == ".tsv" else ",", low_memory=False)
    except (OSError, ValueError, KeyError, EOFError, OverflowError, MemoryError, RecursionError) as error:
        reason = first_line(error).strip()
        raise PefllError(f"{path} cannot be read as {what}: {reason}; save it again", code="PEFLL-D163") from None
