"""A cache of parsed data sets as `.npy` files, so that slow formats are read only once."""

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
from pefll.data.raw_columns import RawColumn
from pefll.data.samples import Normalise, Samples

# Increase this number when a loader returns other samples than before. Then older entries are made again.
VERSION = 5
FOLDER = ".pefll-cache"
_MANIFEST = "manifest.json"
_ARRAYS = ("x", "y", "split", "client", "client_keys", "time", "row")
# Fields of `Samples` that are in the manifest.
_VALUES = ("classes", "normalise", "name", "class_names", "client_names", "tokens", "feature_names")
# Fields that are absent from older entries, and their values there.
_LATER = {"label_column": "", "client_column": "", "time_column": "", "unlabelled": 0}

Report = Callable[[str], None]
# State of the files from which an entry was made, as JSON values.
Stamp = Mapping[str, Any]


def cached(
    name: str,
    data_dir: Path,
    stamp: Stamp,
    build: Callable[[], Samples],
    report: Report | None = None,
    what: str = "",
) -> Samples:
    """Return the samples of `build`, from the cache if the entry there has the same `stamp`.

    A damaged entry is made again. If the folder cannot be written, nothing is cached.

    Args:
        name: name of the entry, a folder in `data_dir/.pefll-cache`.
        data_dir: the data folder.
        stamp: the state of the files that `build` reads, see `stamp_of`.
        build: makes the samples.
        report: is called with a sentence before slow steps.
        what: name of the data in these sentences; by default the entry's name and the folder.

    Returns:
        Samples whose arrays are mapped from disk if they are cached.
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
    # Return the arrays mapped from disk, so that the built ones are freed.
    return _read(entry, stamp) or built


def intact(name: str, data_dir: Path) -> bool | None:
    """Return whether the files of a cache entry still have their SHA-256; None if there is no entry."""
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
    """Remove the entries of users' files that no longer exist. The stamp of such an entry has the file's `path`."""
    for entry in (data_dir / FOLDER).glob("*"):
        sources = (_manifest(entry) or {}).get("sources")
        path = sources.get("path") if isinstance(sources, dict) else None
        if isinstance(path, str) and not Path(path).exists():
            shutil.rmtree(entry, ignore_errors=True)


def stamp_of(sources: Sequence[Path], data_dir: Path) -> dict[str, list[int]]:
    """Return the size and modification time of each file, by its path in the data folder."""
    stamp = {}
    for path in sources:
        status = path.stat()
        stamp[str(path.relative_to(data_dir))] = [status.st_size, status.st_mtime_ns]  # the folder may be moved
    return stamp


def _manifest(entry: Path) -> dict[str, Any] | None:
    try:
        manifest = parse_json((entry / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("version") == VERSION else None


def _read(entry: Path, stamp: Stamp) -> Samples | None:
    """Return an entry's samples; None if it is absent, out of date or damaged."""
    manifest = _manifest(entry)
    if manifest is None or manifest.get("sources") != stamp:
        return None
    try:
        arrays: dict[str, Any] = {}
        for name, note in manifest["arrays"].items():
            path = entry / f"{name}.npy"
            if name not in _ARRAYS or path.stat().st_size != note["bytes"]:
                return None
            # Copy-on-write ("c"): torch needs writable arrays, but the file must not change.
            arrays[name] = np.load(path, mmap_mode="c", allow_pickle=False)
        about = _LATER | manifest["about"]
        values = {name: about[name] for name in (*_VALUES, *_LATER)}
        if values["normalise"] is not None:
            values["normalise"] = Normalise(*map(tuple, values["normalise"]))
        for name in ("class_names", "client_names", "feature_names"):
            values[name] = tuple(values[name])
        table = tuple(RawColumn(name, kind, tuple(texts)) for name, kind, texts in about.get("table", ()))
        return Samples(**arrays, **values, table=table)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, PefllError):
        return None


def _write(entry: Path, samples: Samples, stamp: Stamp) -> None:
    """Write an entry into a temporary folder, then rename the folder."""
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
        about = {name: getattr(samples, name) for name in (*_VALUES, *_LATER)}
        about["table"] = [[each.name, each.kind, each.values] for each in samples.table]
        manifest = {"version": VERSION, "sources": stamp, "arrays": notes, "about": about}
        (fresh / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        # Only an empty or missing folder can be replaced. Programs that have mapped the old files can still read them.
        shutil.rmtree(entry, ignore_errors=True)
        os.replace(fresh, entry)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
