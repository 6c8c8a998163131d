"""Reads the files of new clients, and of clients of a real federation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.data import folders, frames, owners
from pefll.data.arrays import inputs, labels_of, order_of, samples_from_arrays
from pefll.data.assembly import assemble
from pefll.data.federation import Federation
from pefll.data.missing_labels import has_label, without_gaps
from pefll.data.npz import names_in, read_npz
from pefll.data.owners import (
    CLIENT,
    SPLIT,
    Columns,
    Name,
    Owned,
    Rows,
    by_client,
    clients_of,
    find_owners,
    names_of_owners,
    no_clients,
    refuse_similar,
)
from pefll.data.partition import natural
from pefll.data.samples import Array, Normalise
from pefll.data.table_files import read_frame
from pefll.data.table_plan import TablePlan, encoded
from pefll.data.user_files import LABEL, kind_of_file, no_client_column, npz_label, refuse_columns


def read_client(
    path: Path | str,
    *,
    label: str = LABEL,
    client: str = CLIENT,
    split: str = "split",
    features: Sequence[str] = (),
    class_names: Sequence[str] = (),
    tokens: bool = False,
    alone: bool = False,
    instead: str = "",
    client_named: bool = False,
    plan: TablePlan | None = None,
    labels: str = "classes",
    gaps: bool = False,
    of_client: Callable[[str, Name], object] | None = None,
) -> tuple[Array, Array | None]:
    """Return one client's samples: x [N, ...] as returned by `inputs`, and y as in `Samples`, or None without labels.

    Args:
        path: an `.npz` with x and maybe y; a CSV or Parquet table; a folder `class/*.png`.
        label: name of the column or array of labels. A table may lack it; an `.npz` may lack the default name.
        client: name of the column or array of clients, which is not a feature; may be absent unless `client_named`.
        split: name of a table's column that is not a feature.
        features: names of a table's columns that make up x, in the order of the model; by default all other columns.
        class_names: names of the model's classes, for labels that are texts.
        tokens: whether x holds tokens, which stay whole numbers.
        alone: whether to raise PefllError for a file with samples of several clients.
        instead: end of that error: what else a user can do with such a file.
        client_named: whether the user gave the name `client`; then it must exist.
        plan: what training did to the columns of a table, which replaces `features`; or None.
        labels: what labels are: classes, numbers or sets.
        gaps: whether some labels may be missing. Then all labels are floats, and missing ones are NaN.
        of_client: called with the name `client` and the only client in it, if the file has this column or array.
    """
    features = list(plan.names if plan else features)
    path = Path(path).expanduser()
    kind = kind_of_file(path, "class")
    x: Any
    y: Any
    owned: tuple[str, Any] | None = None  # name and values of the file's column of clients
    candidates = names_of_owners(client, features, named=client_named)
    if kind == "folder":
        refuse_columns(path.name, label, client if client_named else CLIENT)
        if alone and instead and folders.is_of_clients(path):
            raise _several_clients(path, len(folders.from_folder(path).client_names), instead)
        x, y = folders.one_client(path)
    elif kind == "npz":
        named = (*(() if label == LABEL else (label,)), *((client,) if client_named else ()))
        of_labels = npz_label(path, label)
        arrays = read_npz(path, needed=("x", *named), optional=(of_labels, *candidates))
        x = arrays["x"] if plan is None else plan.encode_array(arrays["x"], path.name)
        y = arrays.get(of_labels)
        owned = next(((each, arrays[each]) for each in candidates if each in arrays), None)
        if owned is None:
            refuse_similar(candidates, names_in(path), ("x", label, of_labels), path.name)
    else:
        frame = read_frame(path)
        names = frames.columns(frame)
        # If `features` is empty, all other columns are features, even one with the name `CLIENT`.
        if client_named and frames.find_column(frame, client, path.name) is None:
            raise no_client_column(path, client, names)
        label_columns = frames.label_names(label, names)
        owned = find_owners(frame, candidates if features else (client,), (*features, *label_columns), path.name)
        y = frames.labels_in(frame, label, path.name, class_names if labels == "classes" else ())
        chosen = features or frames.feature_names(frame, (*label_columns, client, split), path.name)
        x = frames.inputs_of(frame, chosen, plan, path.name, tokens=tokens)
    if alone and owned is not None:
        column, values = owned
        clients = clients_of(values, column, path.name)
        if len(clients) > 1:
            raise _several_clients(path, len(clients), instead, f", by {column!r}")
        if of_client and clients and column == client:  # another may be about something else
            of_client(column, clients.pop())
    x = inputs(x, path.name, tokens=tokens)
    there = np.ones(len(x), dtype=bool)
    called = f"{path.name}, column {label!r}" if kind == "table" else path.name
    if y is None:
        labels, found = "classes", np.zeros(len(x), dtype=np.int64)
    elif gaps and y.ndim and not (there := has_label(y)).all():
        known = labels_of(without_gaps(y[there]), class_names, called, labels)
        found = np.zeros((len(y), *known.shape[1:]), dtype=known.dtype)
        found[there] = known
    else:
        found = labels_of(y, class_names, called, labels)
    classes = max(1, int(found.max(initial=0)) + 1) if labels == "classes" else None
    inputs_called = plan.input_names if plan else ()
    plain = samples_from_arrays(
        x, found, classes=classes, name=path.name, tokens=tokens, feature_names=inputs_called, labels=labels
    )
    if not there.all():
        found = found.astype(np.float64)
        found[~there] = np.nan
    return encoded(plain.x) if plan else plain.x, None if y is None or not there.any() else found


def read_each(path: Path | str, columns: Columns, *, tokens: bool = False) -> list[Owned]:
    """Return each client's samples in an `.npz`, a table or a folder `client/class/*.png`; y is None without labels."""
    if kind_of_file(Path(path).expanduser()) == "table":
        return owners.from_frame(read_frame(Path(path).expanduser()), columns, name=str(path), tokens=tokens)
    rows = read_rows(path, columns, tokens=tokens)
    return by_client(rows.x, rows.y, rows.client, Path(path).name)


def read_rows(path: Path | str, columns: Columns, *, tokens: bool = False) -> Rows:
    """Return the samples of all clients in a file or folder, as `read_each` reads them."""
    path = Path(path).expanduser()
    kind = kind_of_file(path)
    if kind == "folder":
        refuse_columns(path.name, columns.label)
        samples = folders.from_folder(path)
        assert samples.client is not None
        names, classes = (np.asarray(each, dtype=object) for each in (samples.client_names, samples.class_names))
        return Rows(samples.x, classes[samples.y], names[samples.client])
    if kind == "npz":
        named = () if columns.label == LABEL else (columns.label,)
        label = npz_label(path, columns.label)
        arrays = read_npz(path, needed=("x", *named), optional=(label, columns.client, SPLIT, columns.time))
        if columns.client not in arrays:
            raise no_clients(str(path), f"array {columns.client!r}")
        split, time = arrays.get(SPLIT), arrays.get(columns.time)
        ordered = None if time is None or split is not None else order_of(time, columns.time, path.name)
        return Rows(arrays["x"], arrays.get(label), arrays[columns.client], split, time=ordered)
    return owners.rows_of_frame(read_frame(path), columns, str(path), tokens=tokens)


def read_member(
    path: Path | str,
    *,
    classes: int,
    label: str = LABEL,
    split: str = "split",
    features: Sequence[str] = (),
    class_names: Sequence[str] = (),
    normalise: Normalise | None = None,
    tokens: bool = False,
    seed: int = 0,
    plan: TablePlan | None = None,
    labels: str = "classes",
) -> Federation:
    """Return a federation with one client, which takes part in the training of a real federation.

    Args:
        path: as for `read_client`; samples must have labels.
        classes: number of classes in the whole federation.
        label: as for `read_client`.
        split: column or array with train, validation and test. Without it, a fifth becomes test, a tenth validation.
        features: as for `read_client`.
        class_names: as for `read_client`.
        normalise: channel statistics that all clients use for uint8 pixels.
        tokens: whether x holds tokens.
        seed: seed of the random splits.
        plan: as for `read_client`.
        labels: what labels are: classes, numbers or sets.
    """
    path = Path(path).expanduser()
    x, y = read_client(
        path,
        label=label,
        split=split,
        features=features,
        class_names=class_names,
        tokens=tokens,
        alone=True,
        plan=plan,
        labels=labels,
    )
    if y is None:
        raise PefllError(f"{path} has no labels; add them, since training needs them", code="PEFLL-D180")
    parts = _read_split(path, split)
    owner = np.zeros(len(x), dtype=np.int64)
    known = classes or None
    plain = samples_from_arrays(x, y, owner, parts, known, path.name, tokens=tokens, labels=labels)
    if plain.split is None:
        made = natural(plain, seed, unseen=0.0)
    else:
        assert plain.client is not None
        made = assemble(plain, plain.client, plain.split, num_seen=1, partition="one client")
    # In place of the statistics of this client alone.
    return replace(made, normalise=normalise if plain.x.dtype == np.uint8 else None)


def _read_split(path: Path, split: str) -> Any:
    """Return the split of each sample in a file; None if the file has no splits."""
    kind = kind_of_file(path)
    if kind == "npz":
        return read_npz(path, needed=(), optional=(split,)).get(split)
    frame = read_frame(path) if kind == "table" else {}
    return frames.column(frame, split, path.name) if split in frames.columns(frame) else None


def _several_clients(path: Path, count: int, instead: str, by: str = "") -> PefllError:
    return PefllError(
        f"{path} holds the samples of {count:,} clients{by}; give a file with the samples of one client"
        f"{instead and f', or {instead}'}",
        code="PEFLL-M034",
    )
