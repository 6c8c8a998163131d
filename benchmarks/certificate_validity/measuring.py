"""Measures worlds in several processes, and reads the file of finished ones.

These functions cannot be in the main module: other processes do not import it.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.certificate_validity.certifiers import CERTIFIERS
from benchmarks.certificate_validity.counting import row_of
from benchmarks.certificate_validity.trained import train_world
from pefll.core.errors import PefllError


def world_row(index: int, seed: int, delta: float, names: Sequence[str]) -> dict[str, Any]:
    """Return a world's certificates beside the truth, as JSON."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    trained = train_world(seed, index, delta)
    found = {one.statement.name: row_of(one) for name in names for one in CERTIFIERS[name](trained)}
    seconds = round(time.perf_counter() - started, 2)
    return {"world": index, "seconds": seconds, "certificates": found}


def rows_of(path: Path, how: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the finished worlds of a file. A last line that was cut off is left out, and removed from the file.

    Args:
        path: the file; it need not exist.
        how: what the worlds must have been measured with: seed, δ, certificates, settings and commit.
    """
    if not path.exists():
        return {}
    whole, lines = path.read_bytes(), []
    for line in whole.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            path.write_bytes(whole[: -len(line)])
            break
        lines.append(json.loads(line))
    for row in lines:
        other = [name for name, value in how.items() if row["how"].get(name) != value]
        if other:
            raise PefllError(
                f"{path} has worlds of another {other[0]}, {row['how'].get(other[0])} instead of {how[other[0]]}; "
                "delete it, or name another file with --resume"
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
