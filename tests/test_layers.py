"""Imports go one way along the data: import-linter's contracts in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_imports_go_one_way():
    command = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([str(command)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
    assert "0 kept" not in done.stdout
