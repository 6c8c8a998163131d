"""The cache folder for compiled machine code: ~/.cache/pefll, or pefll under XDG_CACHE_HOME."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder. If the user has no home, as in some containers, the path cannot be created."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or "")
    base = wanted if wanted.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return (base if base.is_absolute() else Path(os.devnull)) / "pefll"
