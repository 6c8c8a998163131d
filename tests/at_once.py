"""Two threads, or another one, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def both(function: Callable[[int], Any]) -> list[Any]:
    """Return what two threads return that do something at the same time."""
    barrier = threading.Barrier(2, timeout=30)

    def one(number: int) -> Any:
        barrier.wait()
        return function(number)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)
