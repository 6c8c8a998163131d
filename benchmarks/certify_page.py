"""Times `pefll certify` for 1,000 clients: python -m benchmarks.certify_page --data-dir data --out FILE.

The run has CIFAR-10's clients and the paper's LeNet, and a prior, so that the page has every line. Its four rounds of
training are too few to learn, which changes the bounds but not the work. The command is a process of its own, so its
time includes imports and the reading of data.
"""

from __future__ import annotations

import argparse
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from pefll.core.files import write_json
from pefll.engines.hardware import processor
from pefll.training.summary import commit

PEFLL = (sys.executable, "-m", "pefll")


def train(folder: Path, data: Path, clients: int) -> None:
    """Make a run of a few rounds in a folder."""
    given = ["--data", "cifar10", "--data-dir", str(data), "--clients", str(clients), "--rounds", "4"]
    given += ["--prior-clients", "0.5", "--set", "local_steps=2", "--device", "cpu", "--out", str(folder)]
    subprocess.run([*PEFLL, "train", *given], check=True)


def timed(folder: Path) -> dict[str, float]:
    """Return the seconds of the command, and those of the processor."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*PEFLL, "certify", str(folder)], check=True)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 1), "processor_seconds": round(processor_seconds, 1)}


def main() -> None:
    """Train the run, certify it three times, and write the times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept) / "run"
        train(folder, given.data_dir, given.clients)
        turns = [timed(folder) for _ in range(given.turns)]
    record = {
        "command": f"python -m benchmarks.certify_page --clients {given.clients}",
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "platform": platform.platform(), "torch": torch.__version__},
        "clients": given.clients,
        "turns": turns,
    }
    print(record)
    if given.out:
        write_json(given.out, record)


if __name__ == "__main__":
    main()
