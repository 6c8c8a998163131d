"""Checkpoints: safetensors and a manifest with SHA-256, atomic; a damaged one is noticed and the one before it used.

They are large, several times the hypernetwork, and a GPU has better things to do than to wait for a disk: a `Writer`
writes in the background, part by part, so that there is no second copy in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from pefll.core.errors import PefllError
from pefll.core.files import sentences_for_disk_errors, set_aside, sync_folder
from pefll.runs import manifest
from pefll.runs.manifest import MANIFEST

KEEP = 2
TENSORS, HISTORY = "state.safetensors", "history.jsonl"
# What safetensors calls the types that a state may have.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.bool: "BOOL",
}


class Checkpoint(NamedTuple):
    """What is read back.

    Attributes:
        round: rounds done.
        tensors: by name.
        facts: what the writer put into the manifest.
        history: the run's evaluations until then, as the file has them; None where an earlier version wrote it.
    """

    round: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    history: bytes | None = None


class Writer:
    """Writes the checkpoints of a run, one at a time, while the run goes on.

    Args:
        folder: of all checkpoints of the run.
        before: called before a checkpoint is written, in the background too; for what must be on the disk before it.
        then: what to do where it cannot be written, when that is mended.
    """

    def __init__(self, folder: Path, before: Callable[[], None] = lambda: None, then: str = "") -> None:
        self._folder, self._before, self._then = folder, before, then
        self._thread: Thread | None = None
        self._held: dict[str, Tensor] = {}
        self._error: BaseException | None = None

    def begin(
        self, round_: int, tensors: dict[str, Tensor], facts: dict[str, Any], history: bytes | None = None
    ) -> None:
        """Start to write a checkpoint, as soon as the one before is written; see `save` and `wait`.

        Args:
            round_: rounds done.
            tensors: by name, in the host's memory; nobody writes to them any more.
            facts: anything JSON can hold.
            history: the run's evaluations until then, to be kept beside them.
        """
        self.wait()
        # Held here until somebody waits: memory that a GPU copied into is not to be freed by another thread,
        # which would ask the GPU about it in the middle of a recording.
        self._held = tensors
        context = copy_context()  # sentences about a full disk are made there

        def work() -> None:
            try:
                context.run(self._before)
                context.run(save, self._folder, round_, tensors, facts, self._then, history)
            except BaseException as error:  # noqa: BLE001 (raised again by who waits)
                self._error = error

        # Not a daemon: when Python ends, it waits for what is half written.
        self._thread = Thread(target=work, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more; PefllError where it could not be written."""
        error = self._finished()
        if error is not None:
            raise error

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Let what is being written be finished, and raise nothing: the run ends for reasons of its own."""
        self._finished()

    def _finished(self) -> BaseException | None:
        """Wait, and return what went wrong."""
        if self._thread is not None:
            self._thread.join()
        error = self._error
        self._thread, self._held, self._error = None, {}, None
        return error


def save(
    folder: Path,
    round_: int,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    then: str = "",
    history: bytes | None = None,
) -> Path:
    """Write a checkpoint; it appears whole or not at all, and older ones go only afterwards.

    Args:
        folder: of all checkpoints of a run.
        round_: rounds done.
        tensors: by name, in the host's memory.
        facts: anything JSON can hold.
        then: what to do where it cannot be written, when that is mended.
        history: the run's evaluations until then; None for none.

    Returns:
        The folder of this checkpoint.
    """
    final = manifest.folder_of(folder, round_)
    building = folder / f".building-{secrets.token_hex(8)}"
    with sentences_for_disk_errors(f"the checkpoint {final}", then):
        try:
            sweep(folder)
            building.mkdir(parents=True)
            written = {TENSORS: _write(building / TENSORS, _safetensors(tensors))}
            if history is not None:
                written[HISTORY] = _write(building / HISTORY, [memoryview(history)])
            text = json.dumps(manifest.write(round_, written, facts), indent=2) + "\n"
            _write(building / MANIFEST, [memoryview(text.encode())])
            sync_folder(building)
            if os.path.lexists(final):  # a folder cannot be moved onto another one
                final.rename(folder / f".building-{secrets.token_hex(8)}")
            building.rename(final)
            sync_folder(folder)
            sweep(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    for old in manifest.newest_first(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def sweep(folder: Path) -> None:
    """Remove what a killed process left half written; for who holds the run's folder alone."""
    for left_over in folder.glob(".building-*"):
        if left_over.is_symlink():
            left_over.unlink(missing_ok=True)
        shutil.rmtree(left_over, ignore_errors=True)


def _write(path: Path, parts: Iterable[memoryview]) -> dict[str, Any]:
    """Write a file that lasts when this returns, and return how many bytes it has and their SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
            size += part.nbytes
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _safetensors(tensors: dict[str, Tensor]) -> Iterator[memoryview]:
    """Yield the parts of a safetensors file: the length of its header, the header, and every tensor as it lies there.

    Its library would first make a copy of everything, and let no other thread go on meanwhile.
    """
    # Larger numbers first, so that each lies at a multiple of its size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in TYPES:
            raise PefllError(
                f"a checkpoint cannot hold {name}, a tensor of {tensor.dtype}; keep it as another type",
                code="PEFLL-R101",
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little"))
    yield memoryview(text)
    for name in order:
        yield tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def load(path: Path, run: str = "") -> Checkpoint:
    """Read one checkpoint and check every byte of it.

    Args:
        path: its folder.
        run: the number of the run that it should be of; empty where that is not known.

    Raises:
        PefllError: where it is damaged, or in another's place; the sentence says how.
    """
    found = manifest.read(path, run)
    contents = {name: _read(path, name, wanted) for name, wanted in found.files.items()}
    try:
        tensors = safetensors.torch.load(contents[TENSORS])
    except (safetensors.SafetensorError, ValueError, TypeError, RuntimeError, KeyError) as error:
        raise _damaged(path, f"its tensors cannot be read ({error})") from error
    return Checkpoint(found.round, tensors, found.facts, contents.get(HISTORY))


def _read(path: Path, name: str, wanted: dict[str, Any]) -> bytes:
    """Return the content of a checkpoint's file, where it is what its manifest says."""
    try:
        content = (path / name).read_bytes()
    except FileNotFoundError as error:
        raise PefllError(
            f"the checkpoint {path} is incomplete: {error.filename} is missing", code="PEFLL-R004"
        ) from error
    except OSError as error:
        raise _damaged(path, f"{name} cannot be read ({error.strerror})") from error
    if len(content) != wanted["bytes"]:
        raise _damaged(path, f"{name} has {len(content):,} bytes instead of {wanted['bytes']:,}")
    if hashlib.sha256(content).hexdigest() != wanted["sha256"]:
        raise _damaged(path, f"the SHA-256 of {name} is wrong")
    return content


def _damaged(path: Path, how: str) -> PefllError:
    return PefllError(f"the checkpoint {path} is damaged: {how}", code="PEFLL-R004")


def latest(folder: Path, report: Callable[[str], None], run: str = "") -> Checkpoint:
    """Return the newest checkpoint that is whole.

    Args:
        folder: of all checkpoints of a run.
        report: told of each damaged one that was passed over.
        run: the run's number; see `load`.

    Raises:
        PefllError: where there is none.
    """
    candidates = manifest.newest_first(folder)
    if not candidates:
        raise PefllError(
            f"{folder.parent} has no checkpoint yet: the run was stopped before its first one; start it anew",
            code="PEFLL-R015",
        )
    reasons: list[str] = []
    for path in candidates:
        try:
            return load(path, run)
        except PefllError as error:
            report(f"{error.args[0]}; it is passed over")
            if error.code in (manifest.OTHER_ROUND, manifest.OTHER_RUN):
                reasons.append(error.args[0])
    if reasons:  # nothing is lost yet
        raise PefllError(f"no checkpoint in {folder} is in its place: {reasons[0]}", code="PEFLL-R018")
    raise PefllError(f"no checkpoint in {folder} is whole; start the run anew", code="PEFLL-R007")


def set_newer_aside(folder: Path, round_: int, report: Callable[[str], None]) -> None:
    """Rename the checkpoints after a round, which are damaged: they must not push out whole ones."""
    for path in manifest.newest_first(folder):
        if int(path.name[6:]) > round_:
            report(f"{path} is kept as {set_aside(path).name}")
