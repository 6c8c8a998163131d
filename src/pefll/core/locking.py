"""Locks on open files, on systems that have them. Elsewhere asking for one is an OSError, as on some file systems."""

from __future__ import annotations

import errno
import os
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not a Unix system
    fcntl = None

# For `os.open`: a link is not followed, and processes that are started do not inherit the file.
PRIVATE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def lock(handle: int, wait: bool = True) -> None:
    """Lock an open file, until it is closed or the process ends, however it ends.

    Args:
        handle: the file.
        wait: until nobody else has locked it; otherwise OSError where somebody has.
    """
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def unlock(handle: int) -> None:
    """Unlock an open file, also for processes that were forked with it."""
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)
