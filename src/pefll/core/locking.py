"""Locks on open files. Systems and file systems without them raise OSError."""

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
    """Lock an open file until it is closed or the process ends; OSError if it is locked, unless `wait`."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def unlock(handle: int) -> None:
    """Unlock an open file, also for processes that were forked with it."""
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)
