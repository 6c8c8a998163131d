"""Checkpoints: safetensors and a manifest with SHA-256, atomic; a damaged one is noticed and the one before it used.

They are large, several times the hypernetwork, and a GPU has better things to do than to wait for a disk: a `Writer`
writes in the background, part by part, so that there is no second copy in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
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

from pefll.errors import PefllError
from pefll.files import sentences_for_disk_errors, sync_folder

KEEP = 2
TENSORS, MANIFEST = "state.safetensors", "manifest.json"
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
    """

    round: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


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

    def begin(self, round_: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Start to write a checkpoint, as soon as the one before is written; see `save` and `wait`.

        Args:
            round_: rounds done.
            tensors: by name, in the host's memory; nobody writes to them any more.
            facts: anything JSON can hold.
        """
        self.wait()
        # Held here until somebody waits or looks: memory that a GPU copied into is not to be freed by another thread,
        # which would ask the GPU about it in the middle of a recording.
        self._held = tensors
        context = copy_context()  # sentences about a full disk are made there

        def work() -> None:
            try:
                context.run(self._before)
                context.run(save, self._folder, round_, tensors, facts, self._then)
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

    def look(self) -> None:
        """Do as `wait` where that takes no time: memory is free for the next copies, and an error is not told late."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

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


def save(folder: Path, round_: int, tensors: dict[str, Tensor], facts: dict[str, Any], then: str = "") -> Path:
    """Write a checkpoint; it appears whole or not at all, and older ones go only afterwards.

    Args:
        folder: of all checkpoints of a run.
        round_: rounds done.
        tensors: by name, in the host's memory.
        facts: anything JSON can hold.
        then: what to do where it cannot be written, when that is mended.

    Returns:
        The folder of this checkpoint.
    """
    final = folder / f"round-{round_:08d}"
    building = folder / f".building-{os.getpid()}"
    with sentences_for_disk_errors(f"the checkpoint {final}", then):
        try:
            for left_over in folder.glob(".building-*"):  # by a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            building.mkdir(parents=True)
            written = _write(building / TENSORS, _safetensors(tensors))
            manifest = {"round": round_, "files": {TENSORS: written}, "facts": facts}
            manifest["sha256"] = _digest(manifest)
            _write(building / MANIFEST, [memoryview((json.dumps(manifest, indent=2) + "\n").encode())])
            sync_folder(building)
            shutil.rmtree(final, ignore_errors=True)
            building.rename(final)
            sync_folder(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    for old in _newest_first(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


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
            raise PefllError(f"a checkpoint cannot hold {name}, a tensor of {tensor.dtype}; keep it as another type")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little"))
    yield memoryview(text)
    for name in order:
        yield tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def load(path: Path) -> Checkpoint:
    """Read one checkpoint and check every byte of it.

    Raises:
        PefllError: where it is damaged; the sentence says how.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest.pop("sha256") != _digest(manifest):
            raise ValueError("its SHA-256 is wrong")
        expected = manifest["files"][TENSORS]
        content = (path / TENSORS).read_bytes()
        round_, facts = int(manifest["round"]), manifest["facts"]
    except FileNotFoundError as error:
        raise PefllError(f"the checkpoint {path} is incomplete: {error.filename} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PefllError(f"the checkpoint {path} is damaged: its manifest cannot be read ({error})") from error
    if len(content) != expected["bytes"]:
        raise PefllError(
            f"the checkpoint {path} is damaged: {TENSORS} has {len(content):,} bytes instead of {expected['bytes']:,}"
        )
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise PefllError(f"the checkpoint {path} is damaged: the SHA-256 of {TENSORS} is wrong")
    try:
        return Checkpoint(round_, safetensors.torch.load(content), facts)
    except safetensors.SafetensorError as error:
        raise PefllError(f"the checkpoint {path} is damaged: {error}") from error


def newest_facts(folder: Path) -> dict[str, Any]:
    """Return what the newest manifest that can be read says, without a look at the tensors; {} where there is none."""
    for path in _newest_first(folder):
        try:
            facts = json.loads((path / MANIFEST).read_text())["facts"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(facts, dict):
            return facts
    return {}


def latest(folder: Path, report: Callable[[str], None]) -> Checkpoint:
    """Return the newest checkpoint that is whole.

    Args:
        folder: of all checkpoints of a run.
        report: told of each damaged one that was passed over.

    Raises:
        PefllError: where there is none.
    """
    candidates = _newest_first(folder)
    if not candidates:
        raise PefllError(
            f"{folder.parent} has no checkpoint yet: the run was stopped before its first one; start it anew"
        )
    for path in candidates:
        try:
            return load(path)
        except PefllError as error:
            report(f"{error}; it is passed over")
    raise PefllError(f"no checkpoint in {folder} is whole; start the run anew")


def _digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content, however it is laid out."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def drop_newer(folder: Path, round_: int) -> None:
    """Remove the checkpoints after a round: a run that goes on from there makes them again."""
    for path in _newest_first(folder):
        if path.name > f"round-{round_:08d}":
            shutil.rmtree(path, ignore_errors=True)


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*"), reverse=True)
