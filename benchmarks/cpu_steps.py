"""Measures client steps per second of one core: a plain PyTorch loop, and the serial engine.

The model is the paper's LeNet on random images of CIFAR's shape, with batches of 32 and 50 local steps. Each program
has its own process, because the memory settings of the C library hold for a complete process. The programs take turns,
one at a time, so that other work on the machine slows all of them. The table has medians over turns.

    python -m benchmarks.cpu_steps --turns 12 --out build/steps
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from benchmarks.speed.record import machine
from pefll import __version__
from pefll.core.files import make_folder, write_json
from pefll.data import Federation, federation_from_arrays
from pefll.engines.serial import SerialEngine
from pefll.methods import build_method
from pefll.models import lenet
from pefll.runs.problem import describe_problem
from pefll.training.summary import commit

CLIENTS, SAMPLES, CLIENTS_PER_ROUND, LOCAL_STEPS, BATCH = 20, 250, 4, 50, 32
STEPS = CLIENTS_PER_ROUND * LOCAL_STEPS
Turn = Callable[[], None]
Turns = Callable[[], AbstractContextManager[Turn]]


def pictures() -> Federation:
    """Return a federation of random images."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (CLIENTS * SAMPLES, 3, 32, 32), dtype=np.uint8)
    y = rng.integers(0, 10, len(x))
    return federation_from_arrays(x, y, np.arange(len(x)) % CLIENTS)


@contextmanager
def plain() -> Iterator[Turn]:
    """Yield a function that does a turn of the usual loop: float images, a module, torch's optimiser."""
    torch.set_num_threads(1)
    federation = pictures()
    data = [
        (federation.prepare(federation.x[rows], torch.float32), federation.y[rows])
        for rows in (federation.indices(client) for client in range(CLIENTS_PER_ROUND))
    ]
    server = lenet((3, 32, 32), 10)
    client = lenet((3, 32, 32), 10)

    def turn() -> None:
        for x, y in data:
            client.load_state_dict(server.state_dict())
            optimiser = torch.optim.SGD(client.parameters(), lr=2e-3, momentum=0.9, weight_decay=5e-5)
            for _ in range(LOCAL_STEPS):
                rows = torch.randperm(len(x))[:BATCH]
                optimiser.zero_grad()
                F.cross_entropy(client(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(client.parameters(), 50.0)
                optimiser.step()

    yield turn


@contextmanager
def serial(method: str, processes: int, clients: int = CLIENTS_PER_ROUND) -> Iterator[Turn]:
    """Yield a function that does a round on the serial engine; the engine's workers end with the iterator."""
    federation = pictures()
    problem, _ = describe_problem(federation, "lenet")
    chosen = build_method(method, problem, {"local_steps": LOCAL_STEPS, "batch_size": BATCH})
    engine = SerialEngine(federation, chosen, 0, clients, processes=processes)
    server = [engine.start()]

    def turn() -> None:
        server[0] = engine.advance(server[0], 0, 1)

    try:
        yield turn
    finally:
        engine.close()


@contextmanager
def strangers() -> Iterator[Turn]:
    """Yield a function that does a turn of two independent runs at once: the best that two cores can do."""
    other = start(lambda: serial("fedavg", 1, CLIENTS_PER_ROUND // 2))
    with serial("fedavg", 1, CLIENTS_PER_ROUND // 2) as mine:

        def turn() -> None:
            other.pipe.send_bytes(b"turn")
            mine()
            other.pipe.recv_bytes()

        yield turn
    other.end()


CONTESTANTS: dict[str, Turns] = {
    "plain PyTorch loop": plain,
    "serial, FedAvg": lambda: serial("fedavg", 1),
    "serial, PeFLL": lambda: serial("pefll", 1),
    "serial, FedAvg, 2 processes": lambda: serial("fedavg", 2),
    "serial, PeFLL, 2 processes": lambda: serial("pefll", 2),
    "serial, FedAvg, two runs that share nothing": strangers,
}


@dataclass
class Contestant:
    """A process that takes a turn when asked, and the times of its turns."""

    pipe: Connection
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def take_turn(self) -> None:
        """Make the process do one turn, and store its CPU-seconds and its wall-clock seconds."""
        self.pipe.send_bytes(b"turn")
        cpu, wall = np.frombuffer(self.pipe.recv_bytes())
        self.cpu.append(float(cpu))
        self.wall.append(float(wall))

    def end(self) -> None:
        """End the process."""
        self.pipe.send_bytes(b"")


def _serve(pipe: Connection, make: Turns) -> None:
    with make() as turn:
        turn()
        pipe.send_bytes(b"ready")
        while pipe.recv_bytes():
            cpu, wall = time.process_time(), time.perf_counter()
            turn()
            pipe.send_bytes(np.array([time.process_time() - cpu, time.perf_counter() - wall]).tobytes())


def start(make: Turns) -> Contestant:
    """Return a process that is ready for its first turn."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    context.Process(target=_serve, args=(theirs, make)).start()
    theirs.close()
    mine.recv_bytes()
    return Contestant(mine)


def over_one_process(contestants: dict[str, Contestant]) -> dict[str, list[float]]:
    """Return, for each program with two cores and each turn, its speed divided by that of one process."""
    return {
        name: [b / a for a, b in zip(one.wall, contestants[", ".join(name.split(", ")[:2])].wall, strict=True)]
        for name, one in contestants.items()
        if "2 processes" in name or "two runs" in name
    }


def record(contestants: dict[str, Contestant]) -> dict[str, Any]:
    """Return every turn of every program, and the figures of the table."""
    ratios = over_one_process(contestants)
    return {
        **machine(),
        "version": __version__,
        "commit": commit(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps_a_turn": STEPS,
        "over_one_process": {name: round(statistics.median(ratio), 3) for name, ratio in ratios.items()},
        "turns": {
            name: {"cpu_seconds": _short(one.cpu), "seconds": _short(one.wall)} for name, one in contestants.items()
        },
    }


def _short(seconds: list[float]) -> list[float]:
    return [round(second, 3) for second in seconds]


def main() -> None:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, help="a folder for cpu_steps.json: every turn")
    options = parser.parse_args()
    contestants = {name: start(make) for name, make in CONTESTANTS.items()}
    for _ in track(range(options.turns), "turns", console=Console(stderr=True)):
        for contestant in contestants.values():
            contestant.take_turn()
    table = Table("", "steps a CPU second", "× loop", "a second", "× 1 process", "best")
    base = contestants["plain PyTorch loop"]
    for name, one in contestants.items():
        ratios = over_one_process(contestants).get(name, [])
        of_loop = statistics.median(b / a for a, b in zip(one.cpu, base.cpu, strict=True))
        table.add_row(
            name,
            "" if ratios else f"{STEPS / statistics.median(one.cpu):.0f}",
            "" if ratios else f"{of_loop:.2f}",
            f"{STEPS / statistics.median(one.wall):.0f}",
            f"{statistics.median(ratios):.2f}" if ratios else "",
            f"{max(ratios):.2f}" if ratios else "",
        )
        one.end()
    Console().print(table)
    if options.out is not None:
        make_folder(options.out)
        write_json(options.out / "cpu_steps.json", record(contestants))


if __name__ == "__main__":
    main()
