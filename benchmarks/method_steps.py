"""Compares the time of a client's step in each method with FedAvg, per gradient of a batch.

The data are random images of CIFAR-10's size, partitioned as in the paper. Rounds of all methods with the paper's LeNet
take turns. A method's time for a round is divided by its number of clients and by the number of batch gradients of each
client. The result is compared with that of FedAvg in the same turn. The time includes everything else that a method
does in a round, such as the server's work, descriptors and second models. Local has no rounds: all seen clients train
at once for about as many steps.

    python -m benchmarks.method_steps --out build/steps                      # on a GPU
    python -m benchmarks.method_steps --out build/steps --device cpu --small  # tries the script anywhere
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.lockstep import pictures
from pefll import __version__
from pefll.core.files import write_json
from pefll.data import TRAIN, Federation, make_federation
from pefll.engines.device_queue import queue_of
from pefll.engines.hardware import (
    Hardware,
    device_name,
    make_engine,
    peak_memory_bytes,
    pick_device,
    pick_precision,
    place_data,
)
from pefll.methods import METHODS, build_method
from pefll.runs.problem import describe_problem
from pefll.training.loop import local_steps
from pefll.training.summary import commit

LIMIT = 1.5
STEPS, BATCH = 50, 32  # local steps of a client in a round of most methods, and samples in a batch


class Contestant:
    """One method, its engine and its state.

    Args:
        name: name of the method.
        federation: the data, already on the device.
        options: options of the command line.
    """

    def __init__(self, name: str, federation: Federation, options: argparse.Namespace) -> None:
        self.name = name
        batches = (federation.count[TRAIN, : federation.num_seen] + BATCH - 1) // BATCH  # per epoch
        problem, _ = describe_problem(federation, "lenet")
        settings: dict[str, Any] = {"embedding": "convnet"} if name.startswith("pefll") else {}
        if name == "local":
            settings = {"epochs": max(1, round(STEPS / float(batches.double().mean())))}
        self.method = build_method(name, problem, settings)
        hardware = Hardware(options.device, "vector", pick_precision(options.precision, options.device))
        cohort = max(1, federation.num_clients // 20)
        self.engine = make_engine(hardware, federation, self.method, 0, cohort)
        self.seen = np.arange(federation.num_seen)
        self.round = 0
        before = peak_memory_bytes(options.device)
        if self.method.trains_in_rounds:
            self.steps = cohort * local_steps(self.method, federation)
            self.work: Callable[[int], None] = self.train
            self.rounds = options.rounds
        else:
            assert self.method.batch_size == BATCH
            self.steps = settings["epochs"] * float(batches.sum())
            self.work = self.train_alone
            self.rounds = 1  # in this round all clients train, not only a twentieth of them
        with queue_of(self.engine).turn():
            self.server = self.engine.start()
        self.work(1)
        self.memory = max(0, peak_memory_bytes(options.device) - before)

    def train(self, rounds: int) -> None:
        """Do some rounds."""
        with queue_of(self.engine).turn():
            self.server = self.engine.advance(self.server, self.round, rounds)
        self.round += rounds

    def train_alone(self, rounds: int) -> None:
        """Let every seen client train by itself, `rounds` times."""
        with queue_of(self.engine).turn(), torch.no_grad():
            for _ in range(rounds):
                for _, cohort in self.engine.cohorts(self.seen):
                    self.method.personalize(self.server, cohort)
            if self.engine.device.type == "cuda":
                torch.cuda.synchronize(self.engine.device)


def compare(federation: Federation, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Return the microseconds of a client's batch gradient for every method, and the ratio to FedAvg."""
    names = [name for name in METHODS if not options.methods or name in (*options.methods.split(","), "fedavg")]
    runs = [Contestant(name, federation, options) for name in track(names, "recording", console=console)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in track(range(options.turns), "turns", console=console):
        for run in [*runs[turn % len(runs) :], *runs[: turn % len(runs)]]:
            started = time.perf_counter()
            run.work(run.rounds)
            seconds[run.name].append((time.perf_counter() - started) / (run.rounds * run.steps))
    for run in reversed(runs):
        run.engine.close()
    return [
        {
            "method": run.name,
            "clients": federation.num_clients,
            "clients_at_once": len(run.seen) if run.name == "local" else run.engine.clients_per_round,
            "gradients_per_round": run.steps,
            "microseconds_per_gradient": round(1e6 * statistics.median(seconds[run.name]), 3),
            "over_fedavg": round(
                statistics.median(
                    mine / fedavg for mine, fedavg in zip(seconds[run.name], seconds["fedavg"], strict=True)
                ),
                3,
            ),
            "more_memory_bytes": run.memory,
        }
        for run in runs
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for method_steps.json")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", help="as in `pefll train`")
    parser.add_argument("--clients", default="100,1000", help="federations of so many")
    parser.add_argument("--methods", help="some of them, with commas between; FedAvg is always there")
    parser.add_argument("--rounds", type=int, default=10, help="a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="few samples and rounds: to try the script")
    options = parser.parse_args()
    options.device = pick_device(options.device)
    if options.small:
        options.rounds, options.turns, options.clients = 1, 1, "20"
    console = Console()
    samples = pictures(600 if options.small else 60_000)
    rows = []
    for clients in map(int, options.clients.split(",")):
        federation = make_federation(samples, partition="by-class 2", clients=clients, seed=0)
        placed = place_data(Hardware(options.device, "vector", "float32"), federation, {})
        rows += compare(placed, options, console)
    facts = {
        "device": device_name(options.device),
        "precision": options.precision,
        "torch": torch.__version__,
        "version": __version__,
        "commit": commit(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "small": options.small,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "method_steps.json", {**facts, "methods": rows})
    table = Table("method", "clients", "at once", "gradients a round", "µs a gradient", "× FedAvg", "")
    for row in rows:
        cells = [str(row[key]) for key in ("method", "clients", "clients_at_once")]
        numbers = [f"{row[key]:,.3g}" for key in ("gradients_per_round", "microseconds_per_gradient", "over_fedavg")]
        table.add_row(*cells, *numbers, "" if row["over_fedavg"] <= LIMIT else f"over {LIMIT}")
    console.print(table)


if __name__ == "__main__":
    main()
