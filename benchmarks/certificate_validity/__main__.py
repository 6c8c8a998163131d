"""Counts failures of certificates: python -m benchmarks.certificate_validity --worlds 1000 --processes 2.

Each world has its own client environment, federation and run. All certificates of the run are compared with what is
true of thousands of new clients. Finished worlds are lines of a file (--resume), so that a stopped run goes on.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.certificate_validity.certifiers import CERTIFIERS
from benchmarks.certificate_validity.counting import counts, draw, markdown
from benchmarks.certificate_validity.measuring import measure, rows_of
from benchmarks.certificate_validity.trained import SETTINGS
from pefll.core.errors import PefllError
from pefll.core.files import make_folder, write_json
from pefll.core.progress import monitor
from pefll.engines.hardware import processor
from pefll.training.summary import commit

WORLDS = Path("build/certificate_validity.jsonl")


def main() -> None:
    """Measure all worlds that are not yet in the file, and write the summary, the page and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delta", type=float, default=0.05)
    parser.add_argument("--only", nargs="+", choices=[*CERTIFIERS], default=[*CERTIFIERS], help="certificates")
    parser.add_argument("--resume", type=Path, default=WORLDS, help=f"file of finished worlds (default: {WORLDS})")
    parser.add_argument("--out", type=Path, default=Path("results/certificate_validity.json"))
    given = parser.parse_args()
    # An exception ends the other processes, too; the signal alone would leave them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    path: Path = given.resume
    how = {"seed": given.seed, "delta": given.delta, "only": given.only, "settings": SETTINGS, "commit": commit()}
    try:
        make_folder(given.out.parent)
        make_folder(path.parent)
        done = rows_of(path, how)
    except PefllError as error:
        sys.exit(str(error))
    wanted = [index for index in range(given.worlds) if index not in done]
    with (
        path.open("a") as file,
        monitor(Console(stderr=True), "worlds", given.worlds, given.worlds - len(wanted)) as watch,
    ):
        for row in measure(wanted, given.seed, given.delta, given.only, given.processes):
            done[row["world"]] = row
            file.write(json.dumps({"how": how, **row}) + "\n")
            file.flush()
            watch.at(sum(index < given.worlds for index in done))
    rows = [done[index] for index in sorted(done) if index < given.worlds]
    found = counts(rows, given.delta)
    record = {
        "command": command_of(given),
        "commit": how["commit"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "platform": platform.platform(), "torch": torch.__version__},
        "delta": given.delta,
        "settings": SETTINGS,
        "seconds_per_world": sum(row["seconds"] for row in rows) / len(rows),
        "certificates": [one._asdict() for one in found],
    }
    write_json(given.out, record)
    given.out.with_suffix(".md").write_text("\n".join(markdown(record)) + "\n")
    draw(rows, found, given.delta, given.out.with_suffix(".png"))
    print(f"wrote {given.out}")


def command_of(given: argparse.Namespace) -> str:
    """Return the command that makes the same figures again."""
    delta = "" if given.delta == 0.05 else f" --delta {given.delta:g}"
    only = "" if given.only == [*CERTIFIERS] else f" --only {' '.join(given.only)}"
    return f"python -m benchmarks.certificate_validity --worlds {given.worlds} --seed {given.seed}{delta}{only}"


if __name__ == "__main__":
    main()
