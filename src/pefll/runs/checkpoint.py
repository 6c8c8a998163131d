"""Checkpoints: a folder with tensors and a manifest, written atomically."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from torch import Tensor

from pefll.core import tensorfile
from pefll.core.errors import PefllError
from pefll.core.files import sentences_for_disk_errors, set_aside, sync_folder, write_whole
from pefll.core.machine import available_memory
from pefll.runs import manifest
from pefll.runs.manifest import HISTORY, MANIFEST, Manifest, damaged

KEEP = 2
TENSORS = "state.safetensors"
TOO_LARGE = "PEFLL-L009"
NO_CHECKPOINT = "PEFLL-R015"


class Checkpoint(NamedTuple):
    """The content of a checkpoint.

    Attributes:
        round: number of rounds done.
        tensors: the tensors, by name.
        metadata: the manifest's metadata.
        history: the content of history.jsonl up to this round; None in a checkpoint of an earlier version.
    """

    round: int
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    history: bytes | None = None

    @property
    def names_run(self) -> bool:
        """Whether it has the ID of its run; False in a checkpoint of an earlier version."""
        return "id" in self.metadata.get("run", {})


class Writer:
    """Writes the checkpoints of a run in a thread, one at a time, while the run continues.

    Args:
        folder: the folder of the run's checkpoints.
        before: called in the thread before each checkpoint, to write what must be on disk first.
        then: what a user should do after correcting a disk error.
    """

    def __init__(self, folder: Path, before: Callable[[], None] = lambda: None, then: str = "") -> None:
        self._folder, self._before, self._then = folder, before, then
        self._thread: Thread | None = None
        self._held: dict[str, Tensor] = {}
        self._error: BaseException | None = None

    def begin(
        self, round_: int, tensors: dict[str, Tensor], metadata: dict[str, Any], history: bytes | None = None
    ) -> None:
        """Start to write a checkpoint, after the previous one is written. The arguments are those of `save`.

        The tensors must be in the host's memory, and must not change.
        """
        self.wait()
        # Kept until `wait`, so that this thread frees memory that a GPU copied into. Another thread would call the
        # GPU's driver, which fails while a CUDA graph is captured.
        self._held = tensors
        context = copy_context()  # so that errors name options or arguments as in the caller

        def work() -> None:
            try:
                context.run(self._before)
                context.run(save, self._folder, round_, tensors, metadata, self._then, history)
            except BaseException as error:  # noqa: BLE001 (`wait` raises it)
                self._error = error

        # Not a daemon: Python waits at its end until the checkpoint is complete.
        self._thread = Thread(target=work, name="checkpoint")
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is on disk; PefllError if it cannot be written."""
        error = self.close()
        if error is not None:
            raise error

    def close(self) -> BaseException | None:
        """Wait until nothing is being written; return the error instead of raising it."""
        if self._thread is not None:
            self._thread.join()
        error = self._error
        self._thread, self._held, self._error = None, {}, None
        return error


def save(
    folder: Path,
    round_: int,
    tensors: dict[str, Tensor],
    metadata: dict[str, Any],
    then: str = "",
    history: bytes | None = None,
) -> Path:
    """Write a checkpoint atomically to a folder of checkpoints, remove old ones, and return its own folder.

    `metadata` is anything that JSON can hold. `history` is the content of history.jsonl. `then` says what a user should
    do after correcting a disk error.
    """
    final = manifest.folder_of(folder, round_)
    building = folder / f".building-{secrets.token_hex(8)}"
    with sentences_for_disk_errors(f"the checkpoint {final}", then):
        try:
            sweep(folder)
            building.mkdir(parents=True)
            written = {TENSORS: _write(building / TENSORS, tensorfile.parts(tensors))}
            if history is not None:
                written[HISTORY] = _write(building / HISTORY, [memoryview(history)])
            _write(building / MANIFEST, [memoryview(_text(Manifest(round_, written, metadata)))])
            sync_folder(building)
            if os.path.lexists(final):  # a folder cannot replace another one
                final.rename(folder / f".building-{secrets.token_hex(8)}")
            building.rename(final)
            sync_folder(folder)
            sweep(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    for old in manifest.newest_first(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _text(content: Manifest) -> bytes:
    return (json.dumps(manifest.write(*content), indent=2) + "\n").encode()


def give_run(folder: Path, run: str) -> None:
    """Write a run's ID into manifests of an earlier version, which have none. Damaged manifests do not change."""
    for path in manifest.newest_first(folder):
        try:
            found = manifest.read(path)
        except PefllError:
            continue
        if "run" not in found.metadata and HISTORY not in found.files:
            write_whole(path / MANIFEST, _text(found._replace(metadata=found.metadata | {"run": {"id": run}})))


def sweep(folder: Path) -> None:
    """Remove the incomplete checkpoints of killed processes; the caller must hold the lock of the run's folder."""
    for left_over in folder.glob(".building-*"):
        if left_over.is_symlink():
            left_over.unlink(missing_ok=True)
        shutil.rmtree(left_over, ignore_errors=True)


def _write(path: Path, parts: Iterable[memoryview]) -> dict[str, Any]:
    """Write a file to disk, and return its entry in the manifest: size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
            size += part.nbytes
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def load(path: Path, run: str = "") -> Checkpoint:
    """Return the checkpoint in a folder; PefllError if it is damaged, or of another round or run.

    It must belong to the run with the ID `run`; empty for any run.
    """
    found = manifest.read(path, run)
    contents = {name: _read(path, name, wanted) for name, wanted in found.files.items()}
    try:
        tensors = tensorfile.read(contents[TENSORS])
    except (ValueError, KeyError) as error:
        raise damaged(path, f"its tensors cannot be read ({error})") from error
    return Checkpoint(found.round, tensors, found.metadata, contents.get(HISTORY))


def _read(path: Path, name: str, wanted: dict[str, Any]) -> bytes:
    """Return the content of a checkpoint's file; PefllError if it differs from its entry in the manifest."""
    with suppress(OSError):  # `read_file` says what is wrong
        _check_size(path, name, (path / name).stat().st_size, wanted["bytes"])
    content = manifest.read_file(path, name, wanted["bytes"])
    _check_size(path, name, len(content), wanted["bytes"])
    if hashlib.sha256(content).hexdigest() != wanted["sha256"]:
        raise damaged(path, f"the SHA-256 of {name} is wrong")
    return content


def _check_size(path: Path, name: str, size: int, wanted: int) -> None:
    """Raise PefllError if a checkpoint's file has another size than its manifest says, or does not fit into memory."""
    if size != wanted:
        raise damaged(path, f"{name} has {size:,} bytes instead of {wanted:,}")
    available = available_memory()
    if available is not None and size > available:
        raise PefllError(
            f"the checkpoint {path} has {size:,} bytes in {name}, but only {available:,} bytes of memory are left; "
            "take a machine with more memory",
            code=TOO_LARGE,
        )


def latest(folder: Path, report: Callable[[str], None], run: str = "") -> Checkpoint:
    """Return the newest checkpoint of a run that is not damaged; PefllError if there is none.

    `report` gets a sentence for each damaged checkpoint, and for a checkpoint that does not name its run.
    """
    candidates = manifest.newest_first(folder)
    if not candidates:
        raise PefllError(
            f"{folder.parent} has no checkpoint: the run was stopped before its first one, or its checkpoints were "
            "deleted; put them back, or start the run anew",
            code=NO_CHECKPOINT,
        )
    misplaced: list[str] = []
    for path in candidates:
        try:
            found = load(path, run)
        except PefllError as error:
            if error.code == TOO_LARGE:
                raise
            report(f"{error.args[0]}; it is skipped")
            if error.code in (manifest.OTHER_ROUND, manifest.OTHER_RUN, manifest.NO_RUN):
                misplaced.append(error.args[0])
            continue
        if run and not found.names_run:
            report(
                f"the checkpoint {path} does not name its run: an earlier version wrote it, or somebody put it there; "
                "make sure that it belongs to this run"
            )
        return found
    if misplaced:  # the user can still put these back in order
        raise PefllError(
            f"every checkpoint in {folder} is of another round or run, or is damaged: {misplaced[0]}", code="PEFLL-R018"
        )
    raise PefllError(f"every checkpoint in {folder} is damaged; start the run again", code="PEFLL-R007")


def set_newer_aside(folder: Path, round_: int, report: Callable[[str], None]) -> None:
    """Rename the damaged checkpoints of later rounds, so that `save` counts only good ones."""
    for path in manifest.newest_first(folder):
        if int(path.name[6:]) > round_:
            report(f"{path} is kept as {set_aside(path).name}")
