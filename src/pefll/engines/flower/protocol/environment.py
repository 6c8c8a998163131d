"""Flower's own settings in the environment, looked at before Flower is: it would end with a traceback, or later."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pefll.core.errors import PefllError

PIECE = "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"
_PIECE_BYTES = 5 << 20  # Flower's own default
# The least that each may be. A piece of fewer bytes would be little more than its own name.
_LEAST = {PIECE: 1024, "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS": 1, "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES": 1}


def check_environment(environment: Mapping[str, str] | None = None) -> None:
    """Raise PefllError where the environment sets something of Flower's to what cannot be.

    Args:
        environment: of the process; None for this one's.
    """
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
                f"the environment sets {name} to {given[name][:40]!r}: it must be a whole number from {least:,} on; "
                f"unset it for Flower's default",
                code="PEFLL-F455",
            )


def piece_bytes(environment: Mapping[str, str] | None = None) -> int:
    """Return how many bytes of numbers go into one piece of a message; PefllError where the environment says nonsense.

    Args:
        environment: of the process; None for this one's.
    """
    check_environment(environment)
    given = os.environ if environment is None else environment
    return int(given.get(PIECE, _PIECE_BYTES))
