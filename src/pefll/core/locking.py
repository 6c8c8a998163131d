"""Locks on open files. Where the system or the file system has no locks, the functions raise OSError."""

from __future__ import annotations

import errno
import os
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not a Unix system
    fcntl = None

# For `os.open`: do not follow links, and do not let child processes inherit the file.
PRIVATE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def lock(handle: int, wait: bool = True) -> None:
    """Lock an open file until it is closed or the process ends. With `wait=False`, OSError if it is locked already."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def unlock(handle: int) -> None:
    """Unlock an open file. This also ends the lock of forked processes that inherited the file."""
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)
