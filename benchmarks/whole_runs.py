"""Measures the wall-clock time of complete runs: one seed, several seeds at once, and one seed among 1,000 clients.

PeFLL is trained as `pefll train` does it, with an evaluation every 30 rounds and a checkpoint every 1,000. `seconds` is
the time from a run's first turn, which includes the recording of a round, to its last checkpoint on the disk.
`seconds_with_tests` also includes engines, data and tests. Compiling is not included, because short runs do it before.
`train_seconds` of a run's summary does not include evaluations and waiting of the device. One run and several runs take
turns, `--turns` times. `over_one` is the ratio in the same turn. The data is CIFAR-10 from `--data-dir`, or noise of
the same size if it is missing.

    python -m benchmarks.whole_runs --out build/whole --data-dir data              # on a GPU, some minutes
    python -m benchmarks.whole_runs --out build/whole --device cpu --small         # tries the script anywhere
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.lockstep import pictures
from pefll import __version__
from pefll.core.files import write_json
from pefll.data import Federation, Samples, load_samples, make_federation
from pefll.engines.hardware import device_name, pick_device
from pefll.training.fitting import fit_seeds
from pefll.training.run import Run
from pefll.training.summary import commit

SETTINGS: dict[str, Any] = {"embedding": "convnet", "client_lr": 0.0005, "server_lr": 0.0005}
KEPT = ("train_seconds", "eval_seconds", "wall_seconds", "test_seconds", "best_round", "lockstep", "peak_memory_bytes")


def main() -> None:
    """Measure; print and write after each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for whole-runs.json")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="CIFAR-10, if it is there [data]")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", nargs="+", default=["bf16", "tf32"], help="as in `pefll train`")
    parser.add_argument("--seeds", type=int, default=3, help="runs at once; 1 for single runs only")
    parser.add_argument("--turns", type=int, default=1, help="how often everything is measured")
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument(
        "--thousand", nargs="*", default=["bf16"], help="precisions for 1,000 clients; none to leave it"
    )
    parser.add_argument(
        "--small", action="store_true", help="few samples and rounds: to try the script, not to measure"
    )
    options = parser.parse_args()
    options.device = pick_device(options.device)
    clients, many = (20, 40) if options.small else (100, 1000)
    options.rounds = 1 if options.small else options.rounds
    samples = data(options)
    results: dict[str, Any] = {
        "device": device_name(options.device),
        "torch": torch.__version__,
        "version": __version__,
        "commit": commit(),
        "small": options.small,
        "data": samples.name,
        "rounds": options.rounds,
        "settings": SETTINGS,
        "runs": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)

    def note(entry: dict[str, Any]) -> None:
        results["runs"].append(entry)
        results["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(options.out / "whole-runs.json", results)
        print({name: value for name, value in entry.items() if name != "each"}, flush=True)

    for turn in range(options.turns):
        for precision in options.precision:
            one = whole(samples, clients, 1, precision, options)
            note({"turn": turn} | one)
            if options.seeds == 1:
                continue
            several = whole(samples, clients, options.seeds, precision, options)
            note({"turn": turn} | several | {"over_one": round(several["seconds"] / one["seconds"], 3)})
        for precision in options.thousand:
            note({"turn": turn} | whole(samples, many, 1, precision, options))


def data(options: argparse.Namespace) -> Samples:
    """Return CIFAR-10, or noise of its size."""
    if options.small or not options.data_dir.exists():
        return pictures(3_000 if options.small else 60_000)
    return load_samples("cifar10", options.data_dir)


def whole(samples: Samples, clients: int, seeds: int, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train twice, briefly and then for all rounds, and return the times of the second training."""
    dealt = [make_federation(samples, partition="by-class 2", clients=clients, seed=seed) for seed in range(seeds)]

    def trained(rounds: int) -> list[Run]:
        with tempfile.TemporaryDirectory() as folder:
            return fit_seeds(
                of_seed(dealt),
                seeds=range(seeds),
                model="lenet",
                rounds=rounds,
                out=folder,
                device=str(options.device),
                precision=precision if options.device.type == "cuda" else "auto",
                **SETTINGS,
            )

    trained(min(31, options.rounds))
    began = time.perf_counter()
    runs = trained(options.rounds)
    seconds = time.perf_counter() - began
    return {
        "clients": clients,
        "seeds": seeds,
        "precision": runs[0].summary["precision"],
        # The longest time of a run from its first turn to its last checkpoint; and the time with data, engines, tests.
        "seconds": round(max(run.summary["wall_seconds"] for run in runs), 3),
        "seconds_with_tests": round(seconds, 3),
        "seen": [round(run.summary["accuracy"]["best"]["seen"]["per_sample"], 4) for run in runs],
        "unseen": [round(run.summary["accuracy"]["best"]["unseen"]["per_sample"], 4) for run in runs],
        "each": [{name: run.summary[name] for name in KEPT} for run in runs],
    }


def of_seed(dealt: list[Federation]) -> Callable[[int], Federation]:
    """Return a function that returns the federation of a seed."""
    return lambda seed: dealt[seed]


if __name__ == "__main__":
    main()
