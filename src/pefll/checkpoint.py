"""Checkpoints: safetensors and a manifest with SHA-256, atomic; a damaged one is noticed and the one before it used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
from torch import Tensor

from pefll.errors import PefllError
from pefll.files import sentences_for_disk_errors

KEEP = 2
TENSORS, MANIFEST = "state.safetensors", "manifest.json"


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


def save(folder: Path, round_: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Path:
    """Write a checkpoint; it appears whole or not at all, and older ones go only afterwards.

    Args:
        folder: of all checkpoints of a run.
        round_: rounds done.
        tensors: by name, on any device.
        facts: anything JSON can hold.

    Returns:
        The folder of this checkpoint.
    """
    final = folder / f"round-{round_:08d}"
    building = folder / f".building-{os.getpid()}"
    content = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    manifest = {
        "round": round_,
        "files": {TENSORS: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}},
        "facts": facts,
    }
    manifest["sha256"] = _digest(manifest)
    with sentences_for_disk_errors(f"the checkpoint {final}"):
        try:
            for left_over in folder.glob(".building-*"):  # by a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            building.mkdir(parents=True)
            for name, part in ((TENSORS, content), (MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())):
                with (building / name).open("wb") as file:
                    file.write(part)
                    file.flush()
                    os.fsync(file.fileno())
            shutil.rmtree(final, ignore_errors=True)
            building.rename(final)
            _sync_folder(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    for old in _newest_first(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


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


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
