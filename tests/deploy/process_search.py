"""Find the processes that a test started, by a word in their environment, whatever session or group they are in."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

WORD = "PEFLL_TEST_STARTED"


def alive_with(words: dict[str, str]) -> dict[int, str]:
    """Return the living processes whose environment has all the words, and their commands."""
    wanted = {f"{name}={value}".encode() for name, value in words.items()}
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with suppress(OSError):
                if wanted <= set((place / "environ").read_bytes().split(b"\0")):
                    found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    """Wait for a condition; AssertionError where it does not come true in time."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not come true in time"
        time.sleep(0.05)
