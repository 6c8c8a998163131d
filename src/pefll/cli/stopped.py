"""What a command of many runs says when it is stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pefll.cli.console import INTERRUPTED, err
from pefll.core.progress import say
from pefll.core.signals import Stopped


@contextmanager
def advice_when_stopped(runs: Path, results: Path) -> Iterator[None]:
    """If the block is stopped, print that the same command continues, and exit."""
    try:
        yield
    except Stopped as stopped:
        say(err, f"Saved in {runs} and {results}. The same command continues.")
        sys.exit(128 + stopped.signal)
    except KeyboardInterrupt:
        if not runs.exists():
            raise
        say(err, f"Stopped at once. The same command continues from the files in {runs} and {results}.")
        sys.exit(INTERRUPTED)
