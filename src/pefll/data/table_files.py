"""Reads CSV and Parquet files as data frames."""

from __future__ import annotations

import codecs
import csv
import shlex
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.errors import PefllError, first_line
from pefll.core.wording import counted
from pefll.data.limits import NUMBER, OBJECT, check_growth
from pefll.data.raw_columns import Unread

CSV = (".csv", ".tsv")
PARQUET = (".parquet", ".pq")
TABLES = (*CSV, *PARQUET)

# Memory that pandas needs to read a CSV, in bytes per cell and per column. Cells that a short line lacks count too.
_CSV_CELL, _CSV_COLUMN = 25, 2_000
_CHUNK = 1 << 20  # bytes
_LONGEST = 40  # characters of a type


def read_frame(path: Path) -> Any:
    """Return the table in a CSV or Parquet file as a pandas data frame.

    Parquet columns of lists or other nested values are not read. Their values are `Unread`, so that only a use of them
    is an error.
    """
    parquet = path.suffix.lower() in PARQUET
    what = "Parquet" if parquet else "CSV"
    try:
        import pandas

        if parquet:
            import pyarrow.compute
            import pyarrow.parquet
    except ImportError:
        needs = "pandas pyarrow" if parquet else "pandas"
        raise PefllError(f"reading {what} needs more packages: pip install {needs}", code="PEFLL-D162") from None
    try:
        if parquet:
            return _read_parquet(path, pyarrow)
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        more = _check_csv(path, separator)
        return _named(pandas.read_csv(path, sep=separator, low_memory=False), path, more)
    except UnicodeDecodeError:
        with path.open("rb") as file:
            wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        guess = "it is UTF-16, so" if wide else "if it is Latin-1, as older spreadsheets write it,"
        raise PefllError(
            f"{path} is not UTF-8; {guess} convert it: iconv -f {'utf-16' if wide else 'latin1'} -t utf-8 "
            f"{shlex.quote(path.name)} > utf8.csv",
            code="PEFLL-D597",
        ) from None
    except (OSError, ValueError, KeyError, EOFError, OverflowError, MemoryError, RecursionError, csv.Error) as error:
        reason = first_line(error).strip()
        raise PefllError(f"{path} cannot be read as {what}: {reason}; save it again", code="PEFLL-D163") from None


def _named(frame: Any, path: Path, more: int) -> Any:
    """Return a CSV's table, in which each cell has the name of its column; PefllError if that is unclear.

    If lines have `more` cells than there are names, pandas takes their first cells as an index. So all other cells have
    the wrong names, unless the first cells are row numbers without a name, as R writes them.
    """
    if not more:
        return frame
    index = frame.index
    is_numbered = more == 1 and index.dtype.kind == "i" and index.is_unique and index.is_monotonic_increasing
    if not is_numbered or frame.iloc[:, -1].isna().all():
        names = len(frame.columns)
        raise PefllError(
            f"{path} names {counted(names, 'column')} in its first line, but its other lines have {names + more} "
            "cells; name every column, or remove the separator at the end of the lines",
            code="PEFLL-D674",
        )
    return frame.reset_index(drop=True)


def _check_csv(path: Path, separator: str) -> int:
    """Return how many more cells a CSV's first line of values has than there are names of columns.

    Raises:
        PefllError: for a CSV that needs too much memory, because pandas fills short lines up to the full width.
    """
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
        widths = [len(row) for row in islice(filled, 2)]
    lines = 1
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            lines += chunk.count(b"\n") + chunk.count(b"\r") - chunk.count(b"\r\n")
    check_growth(str(path), path.stat().st_size, max(widths, default=0) * (_CSV_COLUMN + _CSV_CELL * lines))
    return max(0, widths[-1] - widths[0]) if widths else 0


def _read_parquet(path: Path, pyarrow: Any) -> Any:
    """Return the table in a Parquet file; PefllError if the table would take too much memory."""
    stored, needed, texts, first = path.stat().st_size, 0, [], 0
    about = pyarrow.parquet.read_metadata(path)
    schema = about.schema.to_arrow_schema()
    unread: dict[str, Unread] = {}
    for field in schema:
        kind, place = _stored(field.type, pyarrow), first
        first += _leaves(kind, pyarrow)
        if pyarrow.types.is_nested(kind):
            unread[field.name] = Unread(str(kind)[:_LONGEST])
            needed += about.num_rows * NUMBER
            continue
        if _is_text(pyarrow.types, kind):
            texts.append(field.name)
        # Dates, times and decimal numbers become Python objects, like texts.
        is_number = pyarrow.types.is_primitive(kind) and not (
            pyarrow.types.is_date(kind) or pyarrow.types.is_time(kind)
        )
        width = kind.byte_width if pyarrow.types.is_fixed_size_binary(kind) else 0
        for group in map(about.row_group, range(about.num_row_groups)):
            part = group.column(place)  # equal values take few bytes
            rows = max(part.num_values, group.num_rows, 0)
            needed += max(part.total_uncompressed_size, rows * (NUMBER if is_number else OBJECT + width))
    if first != about.num_columns:
        raise ValueError("its schema does not fit its columns")
    check_growth(str(path), stored, needed)
    # The file stores equal texts once. So does a dictionary array, so that the full size can be checked first.
    flat = [name for name in schema.names if name not in unread] if unread else None
    table = pyarrow.parquet.read_table(path, columns=flat, read_dictionary=texts)
    for chunk in (chunk for column in table.columns for chunk in column.chunks):
        if isinstance(chunk, pyarrow.DictionaryArray) and _is_text(pyarrow.types, chunk.dictionary.type):
            lengths = pyarrow.compute.binary_length(chunk.dictionary).cast("int64").take(chunk.indices)
            needed += pyarrow.compute.sum(lengths).as_py() or 0
    check_growth(str(path), stored, needed)
    return _with_unread(table.to_pandas(), unread)


def _with_unread(frame: Any, unread: dict[str, Unread]) -> Any:
    """Return a data frame with a column for each nested column of the file, which has no values."""
    if not unread:
        return frame
    import pandas

    columns = {name: np.full(len(frame), each, dtype=object) for name, each in unread.items()}
    return pandas.concat([frame, pandas.DataFrame(columns, index=frame.index)], axis=1)


def _stored(kind: Any, pyarrow: Any) -> Any:
    """Return the type of the values of an extension or dictionary type; other types unchanged."""
    while isinstance(kind, pyarrow.BaseExtensionType | pyarrow.DictionaryType):
        kind = kind.value_type if isinstance(kind, pyarrow.DictionaryType) else kind.storage_type
    return kind


def _leaves(kind: Any, pyarrow: Any) -> int:
    """Return how many columns of a Parquet file hold the values of a pyarrow type: several for a nested type."""
    kind = _stored(kind, pyarrow)
    return sum(_leaves(kind.field(place).type, pyarrow) for place in range(kind.num_fields)) or 1


def _is_text(types: Any, kind: Any) -> bool:
    """Return whether the pyarrow type `kind` has texts or bytes of any length; `types` is `pyarrow.types`."""
    asked = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    return any(is_kind(kind) for is_kind in asked)
