"""Files that are either whole or not there."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pefll.errors import PefllError


@contextmanager
def sentences_for_disk_errors(what: str, then: str = "") -> Iterator[None]:
    """Turn an OSError inside the block into a PefllError that names the file and the reason.

    Args:
        what: is written.
        then: what to do when the file can be written again; empty where another place will do as well.
    """
    try:
        yield
    except OSError as error:
        causes = {
            errno.ENOSPC: "free some space",
            errno.EDQUOT: "free some space",
            errno.EFBIG: "raise the limit that `ulimit -f` shows",
        }
        cause = causes.get(error.errno or 0, "")
        advice = f"{cause} or choose another place" if cause else "choose another place"
        if then:
            advice = f"{cause}, then {then}" if cause else f"when that is mended, {then}"
        raise PefllError(f"cannot write {what}: {error.strerror or error}; {advice}") from error


def check_folder(path: Path) -> None:
    """Raise PefllError where a folder can neither be written into nor be made; nothing is made here.

    For what takes long before it writes anything.
    """
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    with sentences_for_disk_errors(str(path)):
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def make_folder(path: Path) -> None:
    """Make a folder where there is none, and those above it; PefllError where that cannot be."""
    check_folder(path)  # for its sentence: where a file is in the way, that of `mkdir` is "File exists"
    with sentences_for_disk_errors(str(path)):
        path.mkdir(parents=True, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, if its file system can: a file lasts only if its name does."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:  # mounts of other machines' folders, and folders that may be written and not be read
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM):
            raise


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if path.exists() and not (path.is_file() or path.is_dir()):  # which would be gone then, and not written to
        raise PefllError(f"cannot write {path}: it is a device or a pipe, not a file; choose another place")
    with sentences_for_disk_errors(str(path)):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


_WHOLE_NUMBERS = re.compile(r"\[\n\s+(-?\d+(?:,\n\s+-?\d+)*)\n\s*\]")


def write_json(path: Path, content: Any) -> None:
    """Write JSON, atomically and readable: every entry on a line of its own, but lists of whole numbers in one line."""
    text = json.dumps(content, indent=2)
    # A line break inside a text is written as an escape, so that this finds lists only.
    text = _WHOLE_NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    write_whole(path, (text + "\n").encode())


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows that all have the same keys as a table with a heading, atomically."""
    table = io.StringIO()
    for place, row in enumerate(rows):
        if not place:
            columns = csv.DictWriter(table, list(row), lineterminator="\n")
            columns.writeheader()
        columns.writerow(row)
    write_whole(path, table.getvalue().encode())


def read_json(path: Path) -> Any:
    """Read JSON, or raise PefllError with one sentence."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise PefllError(f"there is no {path}") from error
    except (OSError, ValueError) as error:
        raise PefllError(f"{path} is damaged: {error}") from error
