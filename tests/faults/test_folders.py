"""Small forms of the campaigns against run folders; the large ones are commands, see `results/faults.json`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.faults.run_folders import campaign, figures, prepare


def test_damaged_run_folders_are_refused_recovered_or_the_same(tmp_path):
    result = campaign(prepare(tmp_path), count=120, seed=int(os.environ.get("PEFLL_FAULT_SEED", "1")), resumed=0.1)
    found = figures(result, 0.1)
    assert found["tried"] == 120
    assert found["accepted_silently"] == found["tracebacks"] == found["rows_lost"] == 0, result["examples"]
    assert min(found[name] for name in ("refused", "noted_and_recovered", "harmless")) > 10


def test_killed_runs_end_as_if_nothing_had_happened(tmp_path):
    # In a process of its own: threads that other tests have started do not survive a fork.
    out = tmp_path / "faults.json"
    words = [sys.executable, "-m", "tests.faults.kills", "--count", "6", "--commands", "0", "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, env=environment | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["campaigns"]["kills"]
    assert found["tried"] == 6
    assert found["different_in_the_end"] == found["tracebacks"] == found["left_over"] == 0
