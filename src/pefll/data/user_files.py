"""Reads samples for training from a user's files and folders."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from pefll.core import arguments
from pefll.core.errors import PefllError
from pefll.core.wording import argument
from pefll.data import cache, folders, frames
from pefll.data.arrays import samples_from_arrays
from pefll.data.column_use import AS_IT_IS, Use, refuse_use
from pefll.data.npz import read_npz
from pefll.data.owners import CLIENT, SPLIT
from pefll.data.samples import Samples
from pefll.data.table_files import TABLES, read_frame
from pefll.data.table_samples import from_frame

# Default names of columns. A file may lack columns with default names. A name that a user gives must exist.
LABEL = "label"
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
    kind = kind_of_file(path)
    if kind == "npz":
        refuse_use(use._replace(time=""), path.name)
    elif kind != "table":
        refuse_use(use, path.name)
    if kind == "folder":
        refuse_columns(path.name, label, client)
        return folders.from_folder(path, classes)
    if kind == "npz":
        named = (*(() if client == CLIENT else (client,)), *filter(None, [use.time]))
        y = npz_label(path, label)
        arrays = read_npz(path, needed=("x", y, *named), optional=(client, split))
        samples = samples_from_arrays(
            arrays["x"],
            arrays[y],
            arrays.get(client),
            arrays.get(split),
            classes,
            name=path.stem,
            labels=labels,
            time=arrays.get(use.time),
        )
        return replace(samples, time_column=use.time)
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
        raise no_client_column(path, client, names)
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
    if kind_of_file(path) == "npz":  # a cached copy would be no faster
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
    return [
        list(use.features),
        list(use.drop),
        dict(use.treat),
        use.encode,
        use.time,
        *([use.unlabelled] if use.unlabelled != "refuse" else []),
    ]


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


def npz_label(path: Path, label: str) -> str:
    """Return the name of the array of labels in an `.npz`: the user's name, or else y, or else `LABEL`."""
    if label != LABEL:
        return label
    return LABEL if set(read_npz(path, needed=(), optional=(_NPZ_LABEL, LABEL))) == {LABEL} else _NPZ_LABEL


def no_client_column(path: Path, client: str, names: Sequence[str]) -> PefllError:
    """Return the error for a column of clients that a user named and a table lacks."""
    return PefllError(
        f"{path.name}: there is no column {client!r} with clients; there are {', '.join(names)}: name the right one "
        f"with {argument('client', option='--client-column')}",
        code="PEFLL-D177",
    )


def kind_of_file(path: Path, layout: str = "client/class") -> str:
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
