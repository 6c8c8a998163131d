"""Checks Flower's environment variables before Flower is imported. Flower itself would fail with a traceback."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pefll.core.errors import PefllError

PIECE = "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"
_PIECE_BYTES = 5 << 20  # Flower's own default
# The smallest value of each variable. If a piece were smaller, most of its bytes would be its name.
_LEAST = {PIECE: 1024, "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS": 1, "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES": 1}


def check_environment(environment: Mapping[str, str] | None = None) -> None:
    """Raise PefllError if an environment variable of Flower is invalid; by default in this process's environment."""
    given = os.environ if environment is None else environment
    for name, least in _LEAST.items():
        if name not in given:
            continue
        try:
            fits = int(given[name]) >= least
        except ValueError:
            fits = False
        if not fits:
            raise PefllError(
                f"the environment sets {name} to {given[name][:40]!r}: it must be a whole number, at least {least:,}; "
                f"unset it for Flower's default",
                code="PEFLL-F455",
            )


def piece_bytes(environment: Mapping[str, str] | None = None) -> int:
    """Return the largest number of bytes in one piece of a message; see `check_environment`."""
    check_environment(environment)
    given = os.environ if environment is None else environment
    return int(given.get(PIECE, _PIECE_BYTES))
