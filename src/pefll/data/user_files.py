"""Makes samples and federations from a user's files and arrays."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import numpy as np

from pefll.core import arguments
from pefll.core.errors import PefllError
from pefll.core.wording import argument
from pefll.data import cache, folders, frames, owners
from pefll.data.arrays import inputs, labels_of, samples_from_arrays
from pefll.data.assembly import assemble
from pefll.data.column_use import AS_IT_IS, Use, use_of
from pefll.data.federation import Federation
from pefll.data.normalise import with_channel_stats
from pefll.data.npz import names_in, read_npz
from pefll.data.owners import CLIENT as CLIENT
from pefll.data.owners import (
    Columns,
    Owned,
    by_client,
    find_owners,
    names_of_owners,
    no_clients,
    number_of_clients,
    refuse_similar,
)
from pefll.data.partition import natural
from pefll.data.samples import Array, Normalise, Samples
from pefll.data.selecting import selected
from pefll.data.table_files import TABLES, read_frame
from pefll.data.table_plan import TablePlan, encoded
from pefll.data.table_samples import from_frame

# Default names of columns. A file may lack columns with default names. A name that a user gives must exist.
LABEL, SPLIT = "label", "split"
_NPZ_LABEL = "y"  # default name in .npz files; LABEL is tried next


def read_samples(
    path: Path | str,
    *,
    label: str | Sequence[str] = LABEL,
    client: str = CLIENT,
    split: str = SPLIT,
    classes: int | None = None,
    use: Use = AS_IT_IS,
    labels: str = "auto",
) -> Samples:
    """Return the samples in a user's file or folder.

    Args:
        path: an `.npz` with x, y and maybe client and split; a CSV or Parquet table; a folder `client/class/*.png`.
        label: name of the column or array of labels; in an `.npz`, the default name also finds y. A table may have
            several columns of labels: give a list, or names with commas between them.
        client: name of the column or array of clients; the default name may be absent.
        split: name of the column or array with train, validation, test; it may be absent.
        classes: number of classes; by default the largest label + 1.
        use: how the columns of a table are used.
        labels: what labels are, see `samples_from_arrays`.
    """
    path = arguments.path(path).expanduser()
    label = frames.joined_names(label)
    label, client, split = (
        arguments.text(value, name, name) for value, name in ((label, LABEL), (client, CLIENT), (split, SPLIT))
    )
    kind = _kind(path)
    if kind != "table":
        refuse_use(use, path.name)
    if kind == "folder":
        refuse_columns(path.name, label, client)
        return folders.from_folder(path, classes)
    if kind == "npz":
        named = () if client == CLIENT else (client,)
        y = _npz_label(path, label)
        arrays = read_npz(path, needed=("x", y, *named), optional=(client, split))
        return samples_from_arrays(
            arrays["x"], arrays[y], arrays.get(client), arrays.get(split), classes, name=path.stem, labels=labels
        )
    frame = read_frame(path)
    names = frames.columns(frame)
    missing = [each for each in frames.label_names(label, names) if each not in names]
    if missing:
        raise PefllError(
            f"{path.name}: there is no column {missing[0]!r} with labels; there are {', '.join(names)}: name the right "
            f"one with {argument('label')}",
            code="PEFLL-D176",
        )
    if client not in names and client != CLIENT:
        raise _no_client_column(path, client, names)
    return from_frame(
        frame,
        label,
        client if client in names else None,
        # Rows cannot be split both by a column and by time. A column of the default name may be older than the wish.
        split if split in names and split not in use.drop else None,
        classes=classes,
        name=path.stem,
        use=use,
        labels=labels,
    )


def load(
    path: Path | str,
    data_dir: Path,
    report: cache.Report | None = None,
    *,
    label: str = LABEL,
    client: str = CLIENT,
    use: Use = AS_IT_IS,
    labels: str = "auto",
) -> Samples:
    """Return the samples of `read_samples`, from the cache in the data folder if the file has not changed.

    It calls `report` with a sentence before slow steps.
    """
    path = Path(path).expanduser()
    if _kind(path) == "npz":  # a cached copy would be no faster
        return read_samples(path, label=label, client=client, use=use, labels=labels)
    place = str(path.resolve())
    state = state_of(path)

    def build() -> Samples:
        cache.discard_orphans(data_dir)
        return read_samples(path, label=label, client=client, use=use, labels=labels)

    return cache.cached(
        f"own-{hashlib.sha256(place.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}",
        data_dir,
        {"path": place, "state": state, "label": label, "client": client, "use": _as_json(use)}
        | ({} if labels == "auto" else {"labels": labels}),
        build,
        report,
        what=str(path),
    )


def _as_json(use: Use) -> list[Any]:
    """Return how columns are used, as JSON values."""
    return [list(use.features), list(use.drop), dict(use.treat), use.encode, use.time]


def refuse_use(use: Use, name: str) -> None:
    """Raise PefllError if a user said how to use the columns of data that is no table."""
    for what, given in (
        (argument("features"), use.features),
        (argument("drop"), use.drop),
        (argument("treat"), use.treat),
        (argument("time", option="--time-column"), use.time),
    ):
        if given:
            raise PefllError(f"{name} is no table; omit {what}, which is about columns of tables", "PEFLL-D598")


def state_of(path: Path) -> str | list[int]:
    """Return a value that changes with the size or modification time of a file, or of any file in a folder."""
    path = path.expanduser()
    try:
        status = path.stat()
        return folders.state(path) if S_ISDIR(status.st_mode) else [status.st_size, status.st_mtime_ns]
    except FileNotFoundError:
        raise PefllError(f"there is no file or folder {path}", code="PEFLL-D178") from None
    except OSError as error:
        raise PefllError(f"{path} cannot be read: {error.strerror}", code="PEFLL-D179") from None


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
    """
    features = list(plan.names if plan else features)
    path = Path(path).expanduser()
    kind = _kind(path, "class")
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
        of_labels = _npz_label(path, label)
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
            raise _no_client_column(path, client, names)
        label_columns = frames.label_names(label, names)
        owned = find_owners(frame, candidates if features else (client,), (*features, *label_columns), path.name)
        y = frames.label_column(frame, label, path.name) if frames.has_labels(frame, label) else None
        chosen = features or frames.feature_names(frame, (*label_columns, client, split), path.name)
        x = frames.inputs_of(frame, chosen, plan, path.name, tokens=tokens)
    if alone and owned is not None:
        column, values = owned
        count = number_of_clients(values, column, path.name)
        if count > 1:
            raise _several_clients(path, count, instead, f", by {column!r}")
    found = None if y is None else labels_of(y, class_names, path.name, labels)
    x = inputs(x, path.name, tokens=tokens)
    some, classes = found, None
    if found is None or labels == "classes":
        labels, some = "classes", np.zeros(len(x), dtype=np.int64) if found is None else found
        classes = max(1, int(some.max(initial=0)) + 1)
    called = plan.input_names if plan else ()
    plain = samples_from_arrays(
        x, some, classes=classes, name=path.name, tokens=tokens, feature_names=called, labels=labels
    )
    return encoded(plain.x) if plan else plain.x, found


def read_each(path: Path | str, columns: Columns, *, tokens: bool = False) -> list[Owned]:
    """Return each client's samples in an `.npz`, a table or a folder `client/class/*.png`; y is None without labels."""
    path = Path(path).expanduser()
    kind = _kind(path)
    if kind == "folder":
        refuse_columns(path.name, columns.label)
        samples = folders.from_folder(path)
        assert samples.client is not None
        names, classes = (np.asarray(each, dtype=object) for each in (samples.client_names, samples.class_names))
        return by_client(samples.x, classes[samples.y], names[samples.client], path.name)
    if kind == "npz":
        named = () if columns.label == LABEL else (columns.label,)
        label = _npz_label(path, columns.label)
        arrays = read_npz(path, needed=("x", *named), optional=(label, columns.client))
        if columns.client not in arrays:
            raise no_clients(str(path), f"array {columns.client!r}")
        return by_client(arrays["x"], arrays.get(label), arrays[columns.client], path.name)
    return owners.from_frame(read_frame(path), columns, name=str(path), tokens=tokens)


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
    samples = replace(plain, normalise=normalise if plain.x.dtype == np.uint8 else None)
    if samples.split is None:
        return natural(samples, seed, unseen=0.0)
    assert samples.client is not None
    return assemble(samples, samples.client, samples.split, num_seen=1, partition="one client")


def refuse_columns(name: str, label: str, client: str = CLIENT) -> None:
    """Raise PefllError if a user named a column of labels or clients for data without columns."""
    for given, asked, usual in (
        (argument("label", label), label, LABEL),
        (argument("client", client, option="--client-column"), client, CLIENT),
    ):
        if asked != usual:
            raise PefllError(
                f"{name} has no columns; omit {given}, which applies only to tables and .npz files", code="PEFLL-D181"
            )


def _npz_label(path: Path, label: str) -> str:
    """Return the name of the array of labels in an `.npz`: the user's name, or else y, or else `LABEL`."""
    if label != LABEL:
        return label
    return LABEL if set(read_npz(path, needed=(), optional=(_NPZ_LABEL, LABEL))) == {LABEL} else _NPZ_LABEL


def _no_client_column(path: Path, client: str, names: Sequence[str]) -> PefllError:
    return PefllError(
        f"{path.name}: there is no column {client!r} with clients; there are {', '.join(names)}: name the right one "
        f"with {argument('client', option='--client-column')}",
        code="PEFLL-D177",
    )


def _read_split(path: Path, split: str) -> Any:
    """Return the split of each sample in a file; None if the file has no splits."""
    kind = _kind(path)
    if kind == "npz":
        return read_npz(path, needed=(), optional=(split,)).get(split)
    frame = read_frame(path) if kind == "table" else {}
    return frames.column(frame, split, path.name) if split in frames.columns(frame) else None


def _several_clients(path: Path, count: int, instead: str, by: str = "") -> PefllError:
    return PefllError(
        f"{path} holds the samples of {count} clients{by}; give a file with the samples of one client"
        f"{instead and f', or {instead}'}",
        code="PEFLL-M034",
    )


def federation_from_arrays(
    x: Any,
    y: Any,
    client: Any,
    *,
    split: Any = None,
    unseen: float = 0.1,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    name: str = "arrays",
    tokens: bool = False,
    labels: str = "auto",
) -> Federation:
    """Return a federation of the clients that a user's arrays name.

    Args:
        x: [N, ...] numbers: features, tokens, or images channels-first or channels-last, see `arrays.inputs`.
        y: labels: [N] whole numbers from 0 or texts; [N] or [N, k] floats; [N, k] of 0 and 1, see `Samples`.
        client: [N] the owner of each sample: any whole numbers or texts.
        split: [N] train, validation, test (or 0, 1, 2); None to split each client's samples at random.
        unseen: fraction of clients that never take part in training.
        validation: fraction of each client's training samples that become validation samples.
        test: fraction of each client's samples that become test samples, if `split` is None.
        seed: seed of the random splits and of the order of clients.
        classes: number of classes; by default the largest label + 1.
        name: name of the data.
        tokens: whether x holds whole numbers that a model embeds, for example a text as [N, length].
        labels: what labels are, see `samples_from_arrays`; with auto, their type and shape tell.
    """
    if client is None:
        name = arguments.text(name, "name")
        raise PefllError(
            f"{name}: there is no client column; name the clients, or partition the samples by class", code="PEFLL-D182"
        )
    samples = samples_from_arrays(x, y, client, split, classes, name, tokens=tokens, labels=labels)
    return with_channel_stats(natural(samples, seed, unseen=unseen, validation=validation, test=test))


def federation_from_frame(
    frame: Any,
    label: str | Sequence[str],
    client: str,
    *,
    split: str | None = None,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    treat: Mapping[str, str] | None = None,
    missing: str = "impute",
    encode: str = "auto",
    min_samples: int = 1,
    time: str | None = None,
    unseen: float = 0.1,
    unseen_clients: Sequence[int | str] = (),
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    name: str = "frame",
    labels: str = "auto",
) -> Federation:
    """Return a federation of the clients in a table.

    Numbers are standardised, categories get an input per value, and missing values are filled. All this is learned
    from training rows of seen clients, and is stored with each run and model: `federation.table`.

    Args:
        frame: a pandas or polars data frame, a pyarrow table, or a dictionary of columns, with a row per sample.
        label: name of the column of labels; or several names, as a list or with commas between them.
        client: name of the column of clients.
        split: name of the column with train, validation, test; None to split each client's rows at random.
        features: names of the columns that are features, in order; by default all others.
        drop: names of columns that are not used.
        treat: rules for columns, by their names: "number", "category", "date" (days, a trend), "calendar" (time of the
            year, the week and the day), or "text" (counts of words). Dates and long texts need one.
        missing: "impute" fills missing values and marks them, "drop" leaves such rows out, "refuse" is an error.
        encode: "auto", or "none" to use numbers as they are.
        min_samples: clients with fewer rows are left out.
        time: name of a column of dates or numbers: each client's last rows become its test samples, and those before
            them its validation samples.
        unseen: fraction of clients that never take part in training.
        unseen_clients: the clients that never take part in training, by name; they replace `unseen`.
        validation: fraction of each client's training rows that become validation samples.
        test: fraction of each client's rows that become test samples, without `split`.
        seed: seed of the random splits and of the order of clients.
        classes: number of classes; by default the largest label + 1.
        name: name of the data.
        labels: what labels are, see `samples_from_arrays`; with auto, their type and shape tell.
    """
    dropped = [arguments.text(each, "drop") for each in arguments.listed(drop, "drop", "['note']")]
    use = use_of(drop=dropped, treat=treat, encode=encode, time="" if time is None else time)
    samples = from_frame(frame, label, client, split, features, classes=classes, name=name, use=use, labels=labels)
    samples, notes = selected(samples, missing, min_samples)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return with_channel_stats(
        natural(samples, seed, unseen=unseen, validation=validation, test=test, unseen_clients=unseen_clients)
    )


def _kind(path: Path, layout: str = "client/class") -> str:
    """Return "folder", "npz" or "table". Errors name the `layout` that a folder must have."""
    if path.is_dir():
        return "folder"
    if not path.is_file():
        raise PefllError(f"there is no file or folder {path}", code="PEFLL-D178")
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return "npz"
    if suffix in TABLES:
        return "table"
    raise PefllError(
        f"{path} is not a supported type of file; use .npz, .csv, .parquet, or a folder {layout}/*.png",
        code="PEFLL-D184",
    )
