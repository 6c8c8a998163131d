"""Makes files and folders that only their owner can read, whatever the umask is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pefll.core.errors import PefllError
from pefll.core.files import sentences_for_disk_errors, write_whole

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
# Umask for processes that write files without these functions: Flower's database, logs, run folders, clients' state.
PRIVATE_UMASK = 0o077


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can enter, or restrict an existing one.

    Other users cannot reach files in this folder, even if the modes of the files allow it.
    """
    with sentences_for_disk_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        if stat.S_IMODE(path.stat().st_mode) != PRIVATE_FOLDER:
            path.chmod(PRIVATE_FOLDER)


def check_owner(path: Path) -> None:
    """Raise PefllError if a path belongs to another user, who could read and replace its content."""
    found = path.lstat().st_uid
    if found != os.geteuid():
        raise PefllError(
            f"{path} belongs to user number {found}, but this command runs as {os.geteuid()}; choose a folder that "
            "belongs to you, or run the command as that user",
            code="PEFLL-F302",
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that at no time anybody except its owner can read; see `write_whole`."""
    with sentences_for_disk_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content, private=True)


def private_opener(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=private_opener)`; only the owner can read a new file."""
    return os.open(path, flags, PRIVATE_FILE)


def tighten(folder: Path) -> list[Path]:
    """Remove all rights of other users from a folder and everything in it, except links.

    If such a path belongs to another user, it changes nothing and raises PefllError.

    Returns:
        The paths that had rights for others, parents first.
    """
    for path, _ in _loose_paths(folder):
        with suppress(FileNotFoundError):  # another process may have removed the file
            check_owner(path)
    tightened: list[Path] = []
    for path, mode in _loose_paths(folder):
        with sentences_for_disk_errors(f"the mode of {path}"), suppress(FileNotFoundError):
            path.chmod(mode & 0o700)
            tightened.append(path)
    return tightened


def _loose_paths(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield each path in a folder that gives rights to other users, with its mode; links are left out."""
    for place, folders, files in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in (*folders, *files))):
            mode = 0
            with sentences_for_disk_errors(f"the mode of {path}"), suppress(FileNotFoundError):
                mode = path.lstat().st_mode
            if mode & 0o077 and not stat.S_ISLNK(mode):
                yield path, stat.S_IMODE(mode)
