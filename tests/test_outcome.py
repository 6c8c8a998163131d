"""What a run of the tests leaves behind for others to look up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_what_passed_and_what_did_not_is_written_down(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_not(): pass\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_broken(broken): pass\n"
    )
    options = ["-p", "tests.outcome", "--outcome", str(tmp_path / "out.json"), "-p", "no:cacheprovider", "-n", "0"]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_some.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert [found[kind] for kind in ("exit", "passed", "failed", "error", "skipped")] == [1, 1, 1, 1, 1]
    assert [name.rpartition("::")[2] for name in found["failures"]] == ["test_bad", "test_broken"]
    assert list(found["passed_by_file"].values()) == [1]
    assert {"device", "torch", "commit", "finished"} <= set(found)
