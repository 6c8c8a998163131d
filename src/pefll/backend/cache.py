"""Where machine code is kept that was compiled at first use: ~/.cache/pefll, or under XDG_CACHE_HOME."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder; one that can neither be made nor read for a user without a home, as in some containers."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or "")
    base = wanted if wanted.is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return (base if base.is_absolute() else Path(os.devnull)) / "pefll"
