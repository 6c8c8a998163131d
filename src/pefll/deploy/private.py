"""Files and folders that only their owner can read, with any umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pefll.core.errors import PefllError
from pefll.core.files import sentences_for_disk_errors, write_whole

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
# For processes that write files by themselves: Flower's database, logs, run folders, a client's state.
PRIVATE_UMASK = 0o077


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can enter, or restrict an existing one.

    Others cannot reach files in such a folder, even if the files' own modes allow it.
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
            f"{path} belongs to the user with number {found} and not to {os.geteuid()}, who runs this; give a folder "
            "of your own, or run it as that user",
            code="PEFLL-F302",
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first moment on; see `write_whole`."""
    with sentences_for_disk_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content, private=True)


def private_opener(path: str, flags: int) -> int:
    """Opener for `open(..., opener=...)`: only the owner can read a new file."""
    return os.open(path, flags, PRIVATE_FILE)


def tighten(folder: Path) -> list[Path]:
    """Remove all rights of other users from a folder and everything in it, except links.

    Before anything changes, it raises PefllError if a path with such rights belongs to another user.

    Returns:
        The paths that had rights for others, parents first.
    """
    for path, _ in _loose_paths(folder):
        with suppress(FileNotFoundError):  # removed meanwhile
            check_owner(path)
    tightened: list[Path] = []
    for path, mode in _loose_paths(folder):
        with sentences_for_disk_errors(f"the mode of {path}"), suppress(FileNotFoundError):
            path.chmod(mode & 0o700)
            tightened.append(path)
    return tightened


def _loose_paths(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield each path in a folder, but no link, that gives rights to other users, with its mode."""
    for place, folders, files in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in (*folders, *files))):
            mode = 0
            with sentences_for_disk_errors(f"the mode of {path}"), suppress(FileNotFoundError):
                mode = path.lstat().st_mode
            if mode & 0o077 and not stat.S_ISLNK(mode):
                yield path, stat.S_IMODE(mode)
