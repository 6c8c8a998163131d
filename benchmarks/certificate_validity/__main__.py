"""Counts failures of certificates: python -m benchmarks.certificate_validity --worlds 1000 --processes 2.

Each world has its own client environment, federation and run. All certificates of the run are compared with what is
true of thousands of new clients. Finished worlds are lines of a file (--resume), so that a stopped run goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.certificate_validity.certifiers import CERTIFIERS
from benchmarks.certificate_validity.counting import counts, draw, markdown, row_of
from benchmarks.certificate_validity.trained import SETTINGS, train_world
from pefll.core.errors import PefllError
from pefll.core.files import make_folder, write_json
from pefll.core.progress import monitor
from pefll.engines.hardware import processor
from pefll.training.summary import commit


def world_row(index: int, seed: int, delta: float, names: Sequence[str]) -> dict[str, Any]:
    """Return a world's certificates beside the truth, as JSON."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    trained = train_world(seed, index, delta)
    found = {one.statement.name: row_of(one) for name in names for one in CERTIFIERS[name](trained)}
    seconds = round(time.perf_counter() - started, 2)
    return {"seed": seed, "world": index, "delta": delta, "seconds": seconds, "certificates": found}


def rows_of(path: Path, seed: int, delta: float) -> dict[int, dict[str, Any]]:
    """Return the finished worlds of a file. A last line that was cut off is left out, and removed from the file."""
    if not path.exists():
        return {}
    whole, lines = path.read_bytes(), []
    for line in whole.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            path.write_bytes(whole[: -len(line)])
            break
        lines.append(json.loads(line))
    for row in lines:
        if (row["seed"], row["delta"]) != (seed, delta):
            raise PefllError(
                f"{path} has worlds of seed {row['seed']} and delta {row['delta']}; name another file with --resume"
            )
    return {row["world"]: row for row in lines}


def measure(
    wanted: Sequence[int], seed: int, delta: float, names: Sequence[str], processes: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of worlds as they are done."""
    if processes == 1:
        yield from (world_row(index, seed, delta, names) for index in wanted)
        return
    # Forked processes would share torch's threads.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(world_row, index, seed, delta, names) for index in wanted]
        try:
            for job in as_completed(jobs):
                yield job.result()
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> None:
    """Measure all worlds that are not yet in the file, and write the summary, the page and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delta", type=float, default=0.05)
    parser.add_argument("--only", nargs="+", choices=[*CERTIFIERS], default=[*CERTIFIERS], help="certificates")
    parser.add_argument("--resume", type=Path, help="file of finished worlds; by default beside --out")
    parser.add_argument("--out", type=Path, default=Path("results/certificate_validity.json"))
    given = parser.parse_args()
    make_folder(given.out.parent)
    path: Path = given.resume or given.out.with_suffix(".jsonl")
    try:
        done = rows_of(path, given.seed, given.delta)
    except PefllError as error:
        sys.exit(str(error))
    wanted = [index for index in range(given.worlds) if index not in done]
    with (
        path.open("a") as file,
        monitor(Console(stderr=True), "worlds", given.worlds, given.worlds - len(wanted)) as watch,
    ):
        for row in measure(wanted, given.seed, given.delta, given.only, given.processes):
            done[row["world"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            watch.at(sum(index < given.worlds for index in done))
    rows = [done[index] for index in sorted(done) if index < given.worlds]
    found = counts(rows, given.delta)
    record = {
        "command": f"python -m benchmarks.certificate_validity --worlds {given.worlds} --seed {given.seed}",
        "commit": commit(),
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


if __name__ == "__main__":
    main()
