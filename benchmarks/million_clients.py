"""Compares the time of a round among a million clients with that among a thousand.

It builds two synthetic federations that differ only in their number of clients. PeFLL runs on both with the same model,
the same descriptor size and ten clients per round. Rounds of the two take turns in one process, so that other work on
the machine slows both. The table has medians. The large federation is built first. So the peak memory after that
belongs to this federation; it includes the caller's arrays, the interpreter and torch.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pefll import __version__
from pefll.core.errors import PefllError
from pefll.core.files import write_json
from pefll.data import Federation, federation_from_arrays
from pefll.engines.cohort import Engine
from pefll.engines.hardware import processor
from pefll.engines.serial import SerialEngine
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from pefll.runs.problem import describe_problem
from pefll.training.summary import commit

CLASSES = 10
CLASSES_PER_CLIENT = 2
FEW_CLIENTS = 1_000
CLIENTS_PER_ROUND = 10
# Fixed, because the default grows with the number of clients, and so would the work of a round.
SETTINGS = {"descriptor_size": 32, "local_steps": 10}
ENGINES: dict[str, Callable[[Federation, Any], Engine]] = {
    "serial": lambda federation, method: SerialEngine(federation, method, 0, CLIENTS_PER_ROUND, processes=1),
    "vector": lambda federation, method: VectorEngine(federation, method, 0, CLIENTS_PER_ROUND, "cpu"),
}
MOST_BUILD_SECONDS, MOST_BYTES, MOST_RATIO = 60.0, 4e9, 1.5


@dataclass
class Contestant:
    """One engine on one federation, and the time of its rounds.

    Attributes:
        engine: the engine.
        server: the method's state.
        round: number of rounds done.
        milliseconds: time of a round, one entry per turn.
    """

    engine: Engine
    server: Any
    round: int
    milliseconds: list[float]

    def take_turn(self, rounds: int) -> None:
        """Run some rounds and store the mean time of a round."""
        started = time.perf_counter()
        self.server = self.engine.advance(self.server, self.round, rounds)
        self.milliseconds.append(1000 * (time.perf_counter() - started) / rounds)
        self.round += rounds

    @property
    def median(self) -> float:
        """Median milliseconds of a round."""
        return statistics.median(self.milliseconds)


def make_arrays(clients: int, samples: int, features: int) -> tuple[Any, Any, Any]:
    """Return x float32 [N, features], y and client int64 [N]; no other array as large as x is made."""
    random = np.random.default_rng(0)
    x = np.empty((clients * samples, features), dtype=np.float32)
    random.standard_normal(dtype=np.float32, out=x)
    client = np.repeat(np.arange(clients), samples)
    y = random.integers(0, CLASSES_PER_CLIENT, size=len(x))
    y += client
    y %= CLASSES
    # The class depends on the first feature, so that there is something to learn.
    x[:, 0] += y
    return x, y, client


def peak_bytes() -> int:
    """Return the peak memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def build(clients: int, samples: int, features: int, console: Console) -> tuple[Federation, dict[str, float]]:
    """Return a federation, and the time that it took to make its arrays and the federation."""
    with console.status(f"making {clients:,} x {samples} x {features} numbers"):
        started = time.perf_counter()
        x, y, client = make_arrays(clients, samples, features)
        arrays_seconds = time.perf_counter() - started
    with console.status(f"building a federation of {clients:,} clients"):
        started = time.perf_counter()
        federation = federation_from_arrays(x, y, client, classes=CLASSES, name=f"{clients} clients")
        build_seconds = time.perf_counter() - started
    facts = {
        "clients": clients,
        "arrays_seconds": round(arrays_seconds, 3),
        "build_seconds": round(build_seconds, 3),
        "array_bytes": x.nbytes + y.nbytes + client.nbytes,
    }
    return federation, facts


def enter(federation: Federation, engine: str) -> Contestant:
    """Return PeFLL on a federation, after one round of warm-up."""
    problem, _ = describe_problem(federation, "mlp")
    reach = ENGINES[engine](federation, build_method("pefll", problem, SETTINGS))
    return Contestant(reach, reach.advance(reach.start(), 0, 1), 1, [])


def race(large: Federation, small: Federation, rounds: int, turns: int, console: Console) -> dict[str, Any]:
    """Return milliseconds per round on both federations for every engine; they take turns, and turns to be first."""
    pairs = {name: (enter(large, name), enter(small, name)) for name in ENGINES}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("turns", total=2 * len(pairs) * turns)
        for turn in range(turns):
            for name, pair in pairs.items():
                progress.update(bar, description=f"{name} engine, {rounds} rounds a turn")
                for contestant in pair if turn % 2 else reversed(pair):
                    contestant.take_turn(rounds)
                    progress.advance(bar)
    results = {}
    for name, (many, few) in pairs.items():
        results[name] = {
            "ms_per_round_large": round(many.median, 3),
            "ms_per_round_small": round(few.median, 3),
            "ratio": round(many.median / few.median, 4),
            "turns_large": [round(value, 3) for value in many.milliseconds],
            "turns_small": [round(value, 3) for value in few.milliseconds],
        }
        few.engine.close()
        many.engine.close()
    return results


def draw(record: dict[str, Any], console: Console) -> bool:
    """Print the record as a table and return whether everything is within its limit."""
    large, small = record["large"], record["small"]
    table = Table("", f"{large['clients']:,} clients", f"{small['clients']:,} clients", "ratio", "limit")
    for column in table.columns[1:]:
        column.justify = "right"
    checks = []

    def row(what: str, many: str, few: str, ratio: str, limit: str, fine: bool) -> None:
        checks.append(fine)
        table.add_row(what, many, few, ratio, limit, style="" if fine else "red")

    seconds, peak = large["build_seconds"], large["peak_bytes_after_build"]
    few_seconds = f"{small['build_seconds']:.3f} s"
    row("build", f"{seconds:.1f} s", few_seconds, "", f"{MOST_BUILD_SECONDS:.0f} s", seconds < MOST_BUILD_SECONDS)
    row("the caller's arrays", f"{large['array_bytes'] / 1e9:.2f} GB", "", "", "", True)
    limit = f"{MOST_BYTES / 1e9:.0f} GB"
    row("peak memory after build", f"{peak / 1e9:.2f} GB", "", "", limit, peak < MOST_BYTES)
    end = record["peak_bytes"]
    row("peak memory at the end", f"{end / 1e9:.2f} GB", "", "", limit, end < MOST_BYTES)
    for name, result in record["engines"].items():
        many, few = (f"{result[f'ms_per_round_{size}']:.1f} ms" for size in ("large", "small"))
        ratio = result["ratio"]
        row(f"a round, {name} engine", many, few, f"{ratio:.2f}", f"{MOST_RATIO}", ratio <= MOST_RATIO)
    console.print(table)
    return all(checks)


def main() -> int:
    """Run the benchmark; the exit status is 1 if a figure exceeds its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=1_000_000, help="of the large federation [%(default)s]")
    parser.add_argument("--samples", type=int, default=20, help="of a client [%(default)s]")
    parser.add_argument("--features", type=int, default=16, help="of a sample [%(default)s]")
    parser.add_argument("--rounds", type=int, default=20, help="in a turn [%(default)s]")
    parser.add_argument("--turns", type=int, default=9, help="of each federation; the median counts [%(default)s]")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    for name in ("clients", "samples", "features", "rounds", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    console = Console(stderr=True)
    shape = (options.samples, options.features)
    try:
        large, large_facts = build(options.clients, *shape, console)
        large_facts["peak_bytes_after_build"] = peak_bytes()
        small, small_facts = build(FEW_CLIENTS, *shape, console)
        engines = race(large, small, options.rounds, options.turns, console)
    except PefllError as error:
        parser.error(str(error))
    record = {
        "benchmark": "million_clients",
        "command": " ".join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]),
        "commit": commit(),
        "version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "samples_per_client": options.samples,
        "features": options.features,
        "clients_per_round": CLIENTS_PER_ROUND,
        "model": "mlp",
        "settings": SETTINGS,
        "rounds_per_turn": options.rounds,
        "turns": options.turns,
        "large": large_facts,
        "small": small_facts,
        "peak_bytes": peak_bytes(),
        "engines": engines,
    }
    fine = draw(record, Console())
    if options.json:
        write_json(options.json, record)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
