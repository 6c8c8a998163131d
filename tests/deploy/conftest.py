"""Flower's own processes are not measured.

Whenever sys.path changes, coverage looks for our package, and then drops modules that another thread is just importing;
Flower's processes change sys.path before they import an app.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def unmeasured_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield
