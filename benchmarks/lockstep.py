"""Measures the time of several seeds at once, and the time of evaluations compared with training.

The data are random images of CIFAR-10's size, partitioned as in the paper. First, rounds of one run and rounds of
several runs at once, on separate streams, take turns among 100 clients. So other work on the machine slows all of them.
Every seed is also timed by itself. Then rounds and evaluations of all clients take turns, among 100 and among 1,000
clients. Evaluations are measured in two ways: recorded once and replayed, as during training, and call by call. The
figures are medians and ratios of medians; work that is done only once is not timed.

    python -m benchmarks.lockstep --out build/lockstep                     # on a GPU
    python -m benchmarks.lockstep --out build/lockstep --device cpu --small  # tries the script anywhere
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

from pefll import __version__
from pefll.core.files import write_json
from pefll.data import VALIDATION, Federation, Samples, make_federation
from pefll.data.samples import Normalise
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
from pefll.methods import build_method
from pefll.runs.problem import describe_problem
from pefll.training.evaluation import Evaluator, evaluate
from pefll.training.summary import commit

EVAL_EVERY = 30  # as in the paper's code


class Contestant:
    """One seed's run: an engine, its state, and its evaluator.

    Args:
        federation: the data, already on the device.
        seed: seed of the run.
        options: options of the command line.
    """

    def __init__(self, federation: Federation, seed: int, options: argparse.Namespace) -> None:
        problem, _ = describe_problem(federation, "lenet")
        self.method = build_method("pefll", problem, {"embedding": "convnet", "local_steps": options.steps})
        hardware = Hardware(options.device, "vector", pick_precision(options.precision, options.device))
        self.engine = make_engine(hardware, federation, self.method, seed, max(1, federation.num_clients // 20))
        self.queue = queue_of(self.engine)
        self.round = 0
        with self.queue.turn():
            self.evaluator = Evaluator(self.engine, self.method, VALIDATION)
            self.server = self.engine.start()

    def launch(self, rounds: int) -> Callable[[], None]:
        """Start some rounds, and return a function that waits for them."""
        with self.queue.turn():
            self.server, under_way = self.queue.launch(self.server, self.round, rounds)
        self.round += rounds
        return under_way.wait

    def examine(self) -> None:
        """Evaluate all clients with the training loop's recorded graph, while the GPU does nothing else, and wait."""
        with self.queue.turn():
            self.evaluator.begin(self.server).wait()

    def evaluate(self) -> None:
        """Evaluate all clients call by call."""
        with self.queue.turn():
            evaluate(self.engine, self.method, self.server, VALIDATION)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for lockstep.json")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="tf32", help="as in `pefll train`")
    parser.add_argument("--seeds", type=int, default=3, help="runs at once")
    parser.add_argument("--rounds", type=int, default=20, help="a turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=50, help="a client's steps in a round")
    parser.add_argument("--no-evaluation", action="store_true", help="only several seeds at once")
    parser.add_argument("--small", action="store_true", help="few samples and steps: to try the script, not to measure")
    options = parser.parse_args()
    options.device = pick_device(options.device)
    if options.small:
        options.rounds, options.turns, options.steps = 1, 2, 1
    samples = pictures(3_000 if options.small else 60_000)
    at_once = seeds_at_once(samples, options)
    print("seeds_at_once", at_once, flush=True)
    several = () if options.no_evaluation else (20, 40) if options.small else (100, 1000)
    results = {
        "device": device_name(options.device),
        "torch": torch.__version__,
        "version": __version__,
        "commit": commit(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "precision": options.precision,
        "small": options.small,
        "seeds_at_once": at_once,
        "evaluation": [beside_training(samples, clients, options) for clients in several],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "lockstep.json", results)
    print("evaluation", results["evaluation"])


def pictures(total: int) -> Samples:
    """Return noise in the shape of CIFAR-10: two thirds for training, a sixth for validation, a sixth for test."""
    random = np.random.default_rng(0)
    place = np.arange(total)
    return Samples(
        x=random.integers(0, 256, (total, 3, 32, 32), dtype=np.uint8),
        y=place % 10,
        classes=10,
        split=np.array([0, 0, 0, 0, 1, 2], dtype=np.int8)[place // 10 % 6],
        normalise=Normalise((0.5,) * 3, (0.25,) * 3),
        name="noise",
    )


def contestants(samples: Samples, clients: int, seeds: int, options: argparse.Namespace) -> list[Contestant]:
    """Return runs that share their samples; each has already done one round and one evaluation."""
    if options.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(options.device)
    copies: dict[object, torch.Tensor] = {}
    runs = []
    # All arrays are kept until all are moved to the device, because they are recognised by their addresses.
    dealt = [make_federation(samples, partition="by-class 2", clients=clients, seed=seed) for seed in range(seeds)]
    for seed, federation in enumerate(dealt):
        placed = place_data(Hardware(options.device, "vector", "float32"), federation, copies)
        runs.append(Contestant(placed, seed, options))
    for run in runs:
        run.launch(1)()
        run.examine()
    return runs


def seeds_at_once(samples: Samples, options: argparse.Namespace) -> dict[str, Any]:
    """Time rounds of one run and rounds of several runs at once, in turns."""
    clients = 20 if options.small else 100
    runs = contestants(samples, clients, options.seeds, options)
    *alone, at_once = alternate(
        options,
        *(lambda run=run: run.launch(options.rounds)() for run in runs),
        lambda: streams(runs, options.rounds),
    )
    one = statistics.median(alone)
    figures: dict[str, Any] = {
        "clients": clients,
        "clients_per_round": runs[0].engine.clients_per_round,
        "seeds": options.seeds,
        "rounds_a_turn": options.rounds,
        "each_alone_ms_per_round": [round(1000 * seconds / options.rounds, 3) for seconds in alone],
        "one_ms_per_round": round(1000 * one / options.rounds, 3),
        "streams_ms_per_round": round(1000 * at_once / options.rounds, 3),
        "streams_over_one": round(at_once / one, 3),
        "peak_memory_bytes": peak_memory_bytes(options.device),
    }
    for run in reversed(runs):
        run.engine.close()
    return figures


def streams(runs: list[Contestant], rounds: int) -> None:
    """Start rounds of all runs, then wait for all."""
    for wait in [run.launch(rounds) for run in runs]:
        wait()


def beside_training(samples: Samples, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time rounds, recorded evaluations, and evaluations call by call, in turns."""
    (run,) = contestants(samples, clients, 1, options)
    rounds, recorded, by_calls = alternate(options, lambda: run.launch(options.rounds)(), run.examine, run.evaluate)
    run.engine.close()
    between = EVAL_EVERY * rounds / options.rounds
    return {
        "clients": clients,
        "clients_per_round": run.engine.clients_per_round,
        "ms_per_round": round(1000 * rounds / options.rounds, 3),
        "evaluation_ms": round(1000 * recorded, 3),
        "evaluation_call_by_call_ms": round(1000 * by_calls, 3),
        "recorded_over_call_by_call": round(recorded / by_calls, 3),
        "share_of_a_run": round(recorded / (recorded + between), 4),
        "peak_memory_bytes": peak_memory_bytes(options.device),
    }


def alternate(options: argparse.Namespace, *works: Callable[[], None]) -> list[float]:
    """Do each function once without timing, then all in turns; return the median seconds of each."""
    for work in works:
        work()
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(options.turns):
        for work, taken in zip(works, seconds, strict=True):
            started = time.perf_counter()
            work()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in seconds]


if __name__ == "__main__":
    main()
