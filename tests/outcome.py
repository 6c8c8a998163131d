"""A pytest plugin: `-p tests.outcome --outcome FILE` writes down what passed, where, and with which code."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from pefll.core.files import write_json
from pefll.engines.hardware import device_name, pick_device
from pefll.training.summary import commit


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcome", type=Path, help="where to write what passed, as JSON")


def pytest_terminal_summary(terminalreporter, exitstatus, config) -> None:
    if config.getoption("outcome") is None:
        return
    found = {kind: terminalreporter.stats.get(kind, []) for kind in ("passed", "failed", "error", "skipped")}
    write_json(
        config.getoption("outcome"),
        {
            "device": device_name(pick_device("auto")),
            "torch": torch.__version__,
            "commit": commit(),
            "exit": int(exitstatus),
            **{kind: len(reports) for kind, reports in found.items()},
            "failures": [report.nodeid for report in found["failed"] + found["error"]],
            "passed_by_file": dict(sorted(Counter(report.nodeid.split("::")[0] for report in found["passed"]).items())),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )
