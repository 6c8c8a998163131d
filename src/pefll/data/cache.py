"""Parsed data sets as plain `.npy` files, so that only the first load reads slow formats."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.errors import PefllError
from pefll.core.files import parse_json
from pefll.data.federation import Array, Normalise, Samples

# Written into every entry: raise it when a loader changes what it returns.
VERSION = 3
FOLDER = ".pefll-cache"
_MANIFEST = "manifest.json"
_ARRAYS = ("x", "y", "split", "client", "client_keys")
_BLOCK = 1 << 20

Report = Callable[[str], None]
# What tells whether an entry is still good; made of texts, whole numbers, lists and dictionaries, as JSON has them.
Stamp = Mapping[str, Any]


def cached(
    name: str,
    data_dir: Path,
    stamp: Stamp,
    build: Callable[[], Samples],
    report: Report | None = None,
    what: str = "",
) -> Samples:
    """Return what `build` returns, from the cache where its stamp has not changed since.

    An entry whose files have the wrong size, or that cannot be read, is made again. Where the folder cannot be
    written, everything works without a cache.

    Args:
        name: of the entry.
        data_dir: the cache lies in `data_dir/.pefll-cache`.
        stamp: the state of what `build` reads, see `stamp_of`; an entry with another stamp is made again.
        build: makes the samples.
        report: is told what takes time.
        what: is read, for `report`; by default the name and the folder.

    Returns:
        Samples whose arrays are mapped from disk where they are cached.
    """
    say = report or (lambda text: None)
    entry = data_dir / FOLDER / name
    what = what or f"{name} from {data_dir}"
    samples = _read(entry, stamp)
    if samples is not None:
        return samples
    say(f"reading {what}")
    built = build()
    say(f"keeping it in {entry} for the next time")
    try:
        _write(entry, built, stamp)
    except OSError as error:
        say(f"{entry} cannot be written ({error.strerror}); the files will be read again the next time")
        return built
    # The mapped copy, so that the built arrays are freed.
    return _read(entry, stamp) or built


def intact(name: str, data_dir: Path) -> bool | None:
    """Return whether every file of a cache entry has the SHA-256 it was written with; None where there is no entry."""
    entry = data_dir / FOLDER / name
    if not entry.is_dir():
        return None
    manifest = _manifest(entry)
    if manifest is None:
        return False
    try:
        return all(_sha256(entry / f"{array}.npy") == note["sha256"] for array, note in manifest["arrays"].items())
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def discard(name: str, data_dir: Path) -> None:
    """Remove a cache entry, if there is one."""
    shutil.rmtree(data_dir / FOLDER / name, ignore_errors=True)


def discard_orphans(data_dir: Path) -> None:
    """Remove the entries whose stamp names a `path` that is gone: nothing else would ever remove a user's own data."""
    for entry in (data_dir / FOLDER).glob("*"):
        sources = (_manifest(entry) or {}).get("sources")
        path = sources.get("path") if isinstance(sources, dict) else None
        if isinstance(path, str) and not Path(path).exists():
            shutil.rmtree(entry, ignore_errors=True)


def stamp_of(sources: Sequence[Path], data_dir: Path) -> dict[str, list[int]]:
    """Return the sizes and times of files in the data folder."""
    stamp = {}
    for path in sources:
        status = path.stat()
        # Relative, so that the data folder may be moved.
        stamp[str(path.relative_to(data_dir))] = [status.st_size, status.st_mtime_ns]
    return stamp


def _manifest(entry: Path) -> dict[str, Any] | None:
    try:
        manifest = parse_json((entry / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("version") == VERSION else None


def _read(entry: Path, stamp: Stamp) -> Samples | None:
    """Return an entry's samples, or None where there is none, it is out of date, or it is damaged."""
    manifest = _manifest(entry)
    if manifest is None or manifest.get("sources") != stamp:
        return None
    try:
        arrays: dict[str, Array] = {}
        for name, note in manifest["arrays"].items():
            path = entry / f"{name}.npy"
            if name not in _ARRAYS or path.stat().st_size != note["bytes"]:
                return None
            # Copy-on-write: torch wants arrays that could be written to, and the file never is.
            arrays[name] = np.load(path, mmap_mode="c", allow_pickle=False)
        about = manifest["about"]
        normalise = about["normalise"]
        return Samples(
            x=arrays["x"],
            y=arrays["y"],
            classes=about["classes"],
            split=arrays.get("split"),
            client=arrays.get("client"),
            normalise=None if normalise is None else Normalise(*(tuple(values) for values in normalise)),
            name=about["name"],
            class_names=tuple(about["class_names"]),
            client_names=tuple(about["client_names"]),
            tokens=about["tokens"],
            feature_names=tuple(about["feature_names"]),
            client_keys=arrays.get("client_keys"),
            label_column=about.get("label_column", ""),
            client_column=about.get("client_column", ""),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, PefllError):
        return None


def _write(entry: Path, samples: Samples, stamp: Stamp) -> None:
    """Write an entry beside its place and move it there whole."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f"{entry.name}.new-", dir=entry.parent))
    try:
        notes = {}
        for name in _ARRAYS:
            array = getattr(samples, name)
            if array is None:
                continue
            path = fresh / f"{name}.npy"
            np.save(path, array, allow_pickle=False)
            notes[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        about = {
            "classes": samples.classes,
            "normalise": samples.normalise,
            "name": samples.name,
            "class_names": samples.class_names,
            "client_names": samples.client_names,
            "tokens": samples.tokens,
            "feature_names": samples.feature_names,
            "label_column": samples.label_column,
            "client_column": samples.client_column,
        }
        manifest = {"version": VERSION, "sources": stamp, "arrays": notes, "about": about}
        (fresh / _MANIFEST).write_text(json.dumps(manifest))
        # A folder cannot be moved onto one that has files. Programs that have the old one mapped keep its pages.
        shutil.rmtree(entry, ignore_errors=True)
        os.replace(fresh, entry)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
