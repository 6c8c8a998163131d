"""A user's own data: files and arrays in, samples or a federation out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
from pefll.data.federation import Array, Federation, Normalise, Samples, assemble
from pefll.data.normalise import with_channel_stats
from pefll.data.npz import read_npz
from pefll.data.owners import CLIENT as CLIENT
from pefll.data.owners import Columns, Owned, by_client, names_of_owners, no_clients, number_of_clients
from pefll.data.partition import natural

# Where labels and clients are looked for when nobody says where; another name was asked for, and must be there.
LABEL, SPLIT = "label", "split"
# What an .npz calls its labels when nobody says so.
_NPZ_LABEL = "y"


def read_samples(
    path: Path | str, *, label: str = LABEL, client: str = CLIENT, split: str = "split", classes: int | None = None
) -> Samples:
    """Return the samples in a user's file or folder.

    Args:
        path: an `.npz` with x, y and maybe client and split; a CSV or Parquet table; a folder `client/class/*.png`.
        label: a table's column, or an npz's array, of labels; `LABEL` stands for an npz's y.
        client: a table's column, or an npz's array, that says whose each sample is; only `CLIENT` may be absent.
        split: a table's column, or an npz's array, with train, validation, test; may be absent.
        classes: how many classes there are; by default the largest label + 1.
    """
    path = arguments.path(path).expanduser()
    label, client, split = (
        arguments.text(value, name, name) for value, name in ((label, LABEL), (client, CLIENT), (split, "split"))
    )
    kind = _kind(path)
    if kind == "folder":
        refuse_columns(path.name, label, client)
        return folders.from_folder(path, classes)
    if kind == "npz":
        named = () if client == CLIENT else (client,)
        y = npz_label(path, label)
        arrays = read_npz(path, needed=("x", y, *named), optional=(client, split))
        return samples_from_arrays(
            arrays["x"], arrays[y], arrays.get(client), arrays.get(split), classes, name=path.stem
        )
    frame = frames.read_frame(path)
    names = frames.columns(frame)
    if label not in names:
        raise PefllError(
            f"{path.name}: there is no column {label!r} with labels; there are {', '.join(names)}: say which one it is "
            f"with {argument('label')}",
            code="PEFLL-D176",
        )
    if client not in names and client != CLIENT:
        raise _no_client_column(path, client, names)
    return frames.from_frame(
        frame,
        label,
        client if client in names else None,
        split if split in names else None,
        classes=classes,
        name=path.stem,
    )


def load(
    path: Path | str,
    data_dir: Path,
    report: cache.Report | None = None,
    *,
    label: str = LABEL,
    client: str = CLIENT,
) -> Samples:
    """Return what `read_samples` does, from the cache in the data folder where nothing has changed since.

    Args:
        path: see `read_samples`.
        data_dir: has the cache.
        report: is told what takes time.
        label: see `read_samples`.
        client: see `read_samples`.
    """
    path = Path(path).expanduser()
    kind = _kind(path)
    if kind == "npz":
        # It is plain arrays already: a copy of them would be read no faster.
        return read_samples(path, label=label, client=client)
    place = str(path.resolve())
    state = state_of(path)

    def build() -> Samples:
        cache.discard_orphans(data_dir)
        return read_samples(path, label=label, client=client)

    return cache.cached(
        f"own-{hashlib.sha256(place.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}",
        data_dir,
        {"path": place, "state": state, "label": label, "client": client},
        build,
        report,
        what=str(path),
    )


def state_of(path: Path) -> str | list[int]:
    """Return something that changes when a user's file or folder does, by size and time."""
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
) -> tuple[Array, Array | None]:
    """Return one client's own samples, to personalise a model for it or to classify them.

    Args:
        path: an `.npz` with x and maybe y; a CSV or Parquet table; a folder `class/*.png`.
        label: a table's column of labels, which may be absent, or an npz's array; `LABEL` stands for an npz's y, which
            may be absent too.
        client: a table's column that is no feature, or an npz's array; may be absent unless `client_named`.
        split: another one.
        features: a table's columns that make up x, in order: those the model was trained on. By default all others.
        class_names: the classes of the model; needed where the labels are texts.
        tokens: x holds tokens, which stay whole numbers.
        alone: refuse a file that says that its samples are several clients'.
        instead: what else can be done with such a file, for that error.
        client_named: the user named `client` for this file, so that it must be there.

    Returns:
        x [N, ...] as `inputs` stores it, and y int64 [N], or None where the file has no labels.
    """
    path = Path(path).expanduser()
    kind = _kind(path, "class")
    y: Any
    owned: dict[str, Any] = {}  # what the file says about whose its samples are
    candidates = names_of_owners(client, features, named=client_named)
    if kind == "folder":
        refuse_columns(path.name, label, client if client_named else CLIENT)
        if alone and instead and folders.is_of_clients(path):
            raise _several(path, len(folders.from_folder(path).client_names), instead)
        x, y = folders.one_client(path)
    elif kind == "npz":
        named = (*(() if label == LABEL else (label,)), *((client,) if client_named else ()))
        of_labels = npz_label(path, label)
        arrays = read_npz(path, needed=("x", *named), optional=(of_labels, *candidates))
        x, y = arrays["x"], arrays.get(of_labels)
        owned = {each: arrays[each] for each in candidates if each in arrays}
    else:
        frame = frames.read_frame(path)
        # Without the names of features a table's other columns are features, also one with the usual name.
        found = {each: frames.find_column(frame, each, path.name) for each in (candidates if features else (client,))}
        owned = {each: values for each, values in found.items() if values is not None}
        if client_named and client not in owned:
            raise _no_client_column(path, client, frames.columns(frame))
        y = frames.column(frame, label, path.name) if label in frames.columns(frame) else None
        chosen = tuple(features) or frames.feature_names(frame, (label, client, split), path.name)
        x = frames.matrix_by_name(frame, chosen, path.name, tokens=tokens)
    if alone:
        _refuse_several(owned, path, instead)
    labels = None if y is None else labels_of(y, class_names, path.name)
    return _checked(inputs(x, path.name, tokens=tokens), labels, path, tokens), labels


def read_each(path: Path | str, columns: Columns, *, tokens: bool = False) -> list[Owned]:
    """Return the samples of each client in a file or folder of several, to make a model for each of them.

    Args:
        path: an `.npz` with x, a client array and maybe labels; a CSV or Parquet table; a folder `client/class/*.png`.
        columns: where a table, or an .npz, has what.
        tokens: samples are tokens.
    """
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
        label = npz_label(path, columns.label)
        arrays = read_npz(path, needed=("x", *named), optional=(label, columns.client))
        if columns.client not in arrays:
            raise no_clients(str(path), f"array {columns.client!r}")
        return by_client(arrays["x"], arrays.get(label), arrays[columns.client], path.name)
    return owners.from_frame(frames.read_frame(path), columns, name=str(path), tokens=tokens)


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
) -> Federation:
    """Return one client's own samples as a federation of this client alone, to take part in training.

    Args:
        path: see `read_client`; its samples need labels.
        classes: how many classes all clients together have.
        label: see `read_client`.
        split: a table's column, or an npz's array, with train, validation and test. Where there is none, a tenth is
            cut for validation and a fifth for test.
        features: see `read_client`.
        class_names: see `read_client`.
        normalise: channel statistics that all clients use for uint8 pixels.
        tokens: see `read_client`.
        seed: of the cuts.
    """
    path = Path(path).expanduser()
    x, y = read_client(
        path, label=label, split=split, features=features, class_names=class_names, tokens=tokens, alone=True
    )
    if y is None:
        raise PefllError(f"{path} has no labels, and training needs them", code="PEFLL-D180")
    parts = _split_of(path, split)
    plain = samples_from_arrays(x, y, np.zeros(len(x), dtype=np.int64), parts, classes, path.name, tokens=tokens)
    samples = replace(plain, normalise=normalise if plain.x.dtype == np.uint8 else None)
    if samples.split is None:
        return natural(samples, seed, unseen=0.0)
    assert samples.client is not None
    return assemble(samples, samples.client, samples.split, num_seen=1, partition="one client")


def refuse_columns(name: str, label: str, client: str = CLIENT) -> None:
    """Raise PefllError where a label or client was named for data that has no columns.

    Args:
        name: of the data.
        label: as it was asked for; `LABEL` where it was not.
        client: as it was asked for; `CLIENT` where it was not.
    """
    for given, asked, usual in (
        (argument("label", label), label, LABEL),
        (argument("client", client, option="--client-column"), client, CLIENT),
    ):
        if asked != usual:
            raise PefllError(
                f"{name} has no columns: leave {given} away, which is for tables and .npz files only", code="PEFLL-D181"
            )


def npz_label(path: Path, label: str) -> str:
    """Return what an .npz's array of labels is called: as asked for, or else y, or else as a table's column is."""
    if label != LABEL:
        return label
    return LABEL if set(read_npz(path, needed=(), optional=(_NPZ_LABEL, LABEL))) == {LABEL} else _NPZ_LABEL


def _no_client_column(path: Path, client: str, names: Sequence[str]) -> PefllError:
    return PefllError(
        f"{path.name}: there is no column {client!r} with clients; there are {', '.join(names)}: say which one it "
        f"is with {argument('client', option='--client-column')}",
        code="PEFLL-D177",
    )


def _split_of(path: Path, split: str) -> Any:
    """Return a file's split of each sample; None where it does not say."""
    kind = _kind(path)
    if kind == "npz":
        return read_npz(path, needed=(), optional=(split,)).get(split)
    if kind == "table":
        frame = frames.read_frame(path)
        return frames.column(frame, split, path.name) if split in frames.columns(frame) else None
    return None


def _refuse_several(owned: dict[str, Any], path: Path, instead: str) -> None:
    """Raise PefllError where a file that should be one client's does not say so in its column of clients.

    Args:
        owned: that column by its name; of several, the first counts. Empty where there is none.
        path: of the file.
        instead: see `read_client`.
    """
    for column, values in list(owned.items())[:1]:
        count = number_of_clients(values, column, path.name)
        if count > 1:
            raise _several(path, count, instead, f", by {column!r}")


def _several(path: Path, count: int, instead: str, by: str = "") -> PefllError:
    return PefllError(
        f"{path} holds the samples of {count} clients{by}; give a file with those of one"
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
) -> Federation:
    """Return a federation of the clients that a user's arrays name.

    Args:
        x: [N, ...] numbers: features, tokens, or images channels-first or channels-last, see `arrays.inputs`.
        y: [N] labels: whole numbers from 0, or texts.
        client: [N] who owns each sample: any whole numbers or texts.
        split: [N] train, validation, test (or 0, 1, 2); None to cut each client's samples at random.
        unseen: the fraction of clients that never take part in training.
        validation: the fraction of each client's training samples that is held out.
        test: the fraction of each client's samples that is held out, where `split` is None.
        seed: of the cuts and of the order of clients.
        classes: how many classes there are; by default the largest label + 1.
        name: of the data.
        tokens: x holds whole numbers that a model embeds, a text as [N, length], say.
    """
    if client is None:
        name = arguments.text(name, "name")
        raise PefllError(
            f"{name}: there is no client column; name the clients, or partition the samples by class", code="PEFLL-D182"
        )
    samples = samples_from_arrays(x, y, client, split, classes, name, tokens=tokens)
    return with_channel_stats(natural(samples, seed, unseen=unseen, validation=validation, test=test))


def federation_from_frame(
    frame: Any,
    *,
    label: str,
    client: str,
    split: str | None = None,
    features: Sequence[str] | None = None,
    unseen: float = 0.1,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    name: str = "frame",
) -> Federation:
    """Return a federation of the clients that a table names; see `from_frame` and `federation_from_arrays`."""
    samples = frames.from_frame(frame, label, client, split, features, classes=classes, name=name)
    return with_channel_stats(natural(samples, seed, unseen=unseen, validation=validation, test=test))


def _kind(path: Path, layout: str = "client/class") -> str:
    """Return whether a path is a folder, an npz or a table; `layout` is what a folder would have, for errors."""
    if path.is_dir():
        return "folder"
    if not path.is_file():
        raise PefllError(f"there is no file or folder {path}", code="PEFLL-D178")
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return "npz"
    if suffix in frames.TABLES:
        return "table"
    raise PefllError(
        f"{path} is of no known kind: use .npz, .csv, .parquet, or a folder {layout}/*.png", code="PEFLL-D184"
    )


def _checked(x: Array, y: Array | None, path: Path, tokens: bool) -> Array:
    """Pass x through the checks that all samples get: finite, as many as labels, labels not negative."""
    labels = np.zeros(len(x), dtype=np.int64) if y is None else y
    classes = max(1, int(labels.max(initial=0)) + 1)
    return samples_from_arrays(x, labels, classes=classes, name=path.name, tokens=tokens).x
