"""Writes a personal model for each of many new clients into a folder; a second call continues the first."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from pefll.core.errors import PefllError
from pefll.core.files import make_folder, set_aside, write_json
from pefll.core.progress import Monitor, monitor
from pefll.core.tree import leaves
from pefll.core.wording import argument
from pefll.data.owners import Name, Owned
from pefll.data.samples import Array
from pefll.runs.model_folder import INDEX, file_name, held, read_index
from pefll.runs.modelfile import DAMAGED, read_header, read_tensors
from pefll.runs.personal import PersonalModel
from pefll.training.run import Run

DISK_ERROR = "PEFLL-A102"
OLDER = "PEFLL-M040"
_TEXTS = "OUS"  # kinds of arrays whose bytes are no text, or depend on the longest text of other clients


class Written(NamedTuple):
    """The clients of a call of `write_each`.

    Attributes:
        made: clients that got a new model.
        kept: clients that had a model from the same run and samples already.
        errors: the errors of the other clients.
    """

    made: list[Name]
    kept: list[Name]
    errors: dict[Name, PefllError]


def write_each(
    run: Run,
    owned: Sequence[Owned],
    folder: Path,
    *,
    force: bool = False,
    update: bool = False,
    console: Console | None = None,
) -> Written:
    """Write a model for each client into a folder, and the manifest `models.json`; see `_write_manifest`.

    A model that the same run made from the same samples, in any order, is kept. A damaged file is set aside and its
    model is made again. A client with faulty samples does not stop the others. The manifest is written after Ctrl-C,
    too.

    Args:
        run: makes the models.
        owned: the clients' samples.
        folder: the folder for the models; if it is new, only its owner may read it.
        force: whether to make all models again.
        update: whether to make the models again that are of other samples or of another run.
        console: shows progress; None for silence.
    """
    make_folder(folder, private=True)
    with held(folder):
        return _write_models(run, owned, folder, force, update, console)


def _write_models(
    run: Run, owned: Sequence[Owned], folder: Path, force: bool, update: bool, console: Console | None
) -> Written:
    origin = _origin(run)
    made, kept, errors, index, ended = [], [], {}, [], False
    try:
        with monitor(console, "personalising", len(owned)) as watch:
            for done, one in enumerate(owned, start=1):
                path = folder / file_name(one.client)
                try:
                    if one.fault:
                        raise one.fault
                    source = _source(origin, one)
                    if not force and path.exists() and _is_made(path, one.client, source, update, watch):
                        kept.append(one.client)
                    else:
                        model = run.personalize(one.x, one.y)
                        spec = dataclasses.replace(model.spec, made_from=source, client=str(one.client))
                        PersonalModel(model.network, spec, model.task).save(path, overwrite=force or update)
                        made.append(one.client)
                    size = path.stat().st_size
                    index.append(
                        {
                            "user": one.client,
                            "file": path.name,
                            "samples": len(one.x),
                            "bytes": size,
                            "made_from": source,
                        }
                    )
                except PefllError as error:
                    if error.code == DISK_ERROR:  # every further client would have it, too
                        raise
                    errors[one.client] = error
                watch.at(done, f"{len(errors)} failed" if errors else "")
            ended = True
    finally:
        _write_manifest(run, folder, index, errors, complete=ended)
    return Written(made, kept, errors)


def _write_manifest(
    run: Run, folder: Path, index: list[dict[str, Any]], errors: dict[Name, PefllError], *, complete: bool
) -> None:
    """Write `models.json`: the run, the file of each client, and the clients without a model.

    A call that was refused for all its clients changes nothing: their models are those of another run or other samples.

    Args:
        run: made the models.
        folder: holds the models.
        index: an entry for each client with a model.
        errors: the errors of the other clients.
        complete: whether every client has a model or an error; False after Ctrl-C.
    """
    config, earlier = run.config, _earlier(folder)
    of_run = {"method": config.method, "data": config.data, "seed": config.seed, "rounds": run.summary.get("rounds")}
    models = {row["file"]: row for row in [*earlier.get("models", ()), *index]}
    failed = {client: error for client, error in errors.items() if file_name(client) not in models}
    if earlier and complete and not index and not failed:
        return
    content = {
        # If no model is of this run, those in the folder are of an earlier one.
        "run": of_run if index else earlier.get("run", of_run),
        "complete": complete,
        "models": list(models.values()),
        "failed": [{"user": client, "reason": str(error)} for client, error in failed.items()],
    }
    write_json(folder / INDEX, content, private=True)


def _earlier(folder: Path) -> dict[str, Any]:
    """Return the folder's models.json, {} if there is none; a damaged one is set aside."""
    if not (folder / INDEX).is_file():
        return {}
    try:
        return read_index(folder)
    except PefllError:
        set_aside(folder / INDEX)
        return {}


def _origin(run: Run) -> Callable[[], Any]:
    """Return a function that copies a hash of the run's method and state, for the caller to add a client's samples."""
    digest = hashlib.sha256(repr((run.config.method, run.config.seed, sorted(run.config.settings.items()))).encode())
    for leaf in leaves(run.server):
        digest.update(np.ascontiguousarray(leaf.detach().cpu().numpy()).reshape(-1).view(np.uint8).data)
    return digest.copy


def _source(origin: Callable[[], Any], one: Owned) -> str:
    """Return the hash of everything that a client's model is made from; the order of the samples does not change it."""
    digest, parts = origin(), []
    for part in (one.x, one.y):
        if part is not None:
            if part is one.y and part.dtype.kind in "iu":
                part = part.astype(np.int64)  # files and gaps of other clients choose the type of whole numbers
            digest.update(repr((part.shape, str(part.dtype) if part.dtype.kind not in _TEXTS else "text")).encode())
            parts.append(_bytes_of_rows(part))
    rows = np.concatenate(parts, axis=1)
    digest.update(np.sort(rows.view(f"S{rows.shape[1]}"), axis=0).tobytes())
    return str(digest.hexdigest())


def _bytes_of_rows(part: Array) -> Array:
    """Return the bytes of each row of an array [m, ...], uint8 [m, bytes]; of texts, those of a hash of the row."""
    if part.dtype.kind in _TEXTS:  # hashes are equally wide, whatever the longest text is
        hashes = b"".join(hashlib.sha256(repr(row).encode()).digest() for row in part.tolist())
        return np.frombuffer(hashes, dtype=np.uint8).reshape(len(part), -1)
    return np.ascontiguousarray(part).view(np.ndarray).reshape(len(part), -1).view(np.uint8)


def _is_made(path: Path, client: Name, source: str, update: bool, watch: Monitor) -> bool:
    """Return whether a file holds the client's model with the hash `source`; a damaged file is set aside.

    Raises:
        PefllError: if the file cannot be read, or is of another run or other samples and `update` is false.
    """
    try:
        header = read_header(path)
        read_tensors(path, header)
    except PefllError as error:
        if error.code not in DAMAGED:
            raise
        watch.say(f"{error.args[0]}; it is kept as {set_aside(path).name} and made again")
        return False
    # Clients with the same samples have the same hash. Files of earlier versions do not name the client.
    is_made = header.spec.made_from == source and header.spec.client in (None, str(client))
    if not is_made and not update:
        raise PefllError(
            f"{path} exists and was made by another run or from other samples; replace such models with "
            f"{argument('update', True)}",
            code="PEFLL-M040",
        )
    return is_made
