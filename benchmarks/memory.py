"""Compares our estimate of a run's memory with its peak: python -m benchmarks.memory [--out results/memory.json].

Each case is a separate process, since the recorded peak of a process never falls. The memory of the program before
training is measured first and not counted. It includes torch, the data, and a tiny run that makes torch load its
remaining libraries.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
from torch import nn

import pefll
from pefll.engines.memory import MemoryPlan, parts_of

CASES: dict[str, tuple[tuple[int, ...], int | str]] = {
    "mlp of 100,000 weights": ((64,), 1_333),
    "mlp of 1,000,000 weights": ((64,), 13_333),
    "lenet": ((3, 32, 32), "lenet"),
    "resnet20": ((3, 32, 32), "resnet20"),
}
METHODS = ("pefll", "fedavg")
CLIENTS, EACH, PER_ROUND, STEPS = 10, 20, 2, 2


def measure(case: str, method: str, engine: str) -> dict[str, float | str]:
    """Train three rounds of a case in this process, and return the estimated and the measured memory in MB."""
    shape, kind = CASES[case]
    rng = np.random.default_rng(0)
    y, client = rng.integers(0, 10, CLIENTS * EACH), np.repeat(np.arange(CLIENTS), EACH)
    pixels = len(shape) == 3
    x = rng.integers(0, 256, (len(y), *shape)).astype(np.uint8) if pixels else rng.normal(size=(len(y), *shape))
    federation = pefll.federation_from_arrays(x, y, client)
    settings: dict[str, Any] = {
        "clients_per_round": PER_ROUND,
        "local_steps": STEPS,
        "engine": engine,
        "processes": 1,
        "device": "cpu",
    }
    pefll.fit(federation, method, model="tiny", rounds=1, **settings)
    before = _peak()
    model = nn.Sequential(nn.Linear(64, kind), nn.ReLU(), nn.Linear(kind, 10)) if isinstance(kind, int) else kind
    run = pefll.fit(federation, method, model=model, rounds=3, eval_every=1, **settings)
    networks = sum(getattr(run.method, name).size for name in ("h", "phi") if hasattr(run.method, name))
    clients = PER_ROUND if engine == "vector" else 1
    values = int(np.prod(shape))
    plan = MemoryPlan(run.method.problem.model.size, networks, clients, PER_ROUND, STEPS, EACH, values)
    estimated, measured = sum(parts_of(plan)) / 1e6, (_peak() - before) / 1e6
    return {
        "case": case,
        "method": method,
        "engine": engine,
        "weights": plan.weights,
        "estimated_mb": round(estimated, 1),
        "measured_mb": round(measured, 1),
        "ratio": round(estimated / max(measured, 1e-6), 2),
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Measure all cases, or the case that `--case` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=3, metavar=("CASE", "METHOD", "ENGINE"))
    parser.add_argument("--out")
    parser.add_argument("--only", default="", help="a part of the names of the cases that are measured")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.case:
        print(json.dumps(measure(*arguments.case)))
        return
    rows = []
    for case in (each for each in CASES if arguments.only in each):
        for method in METHODS:
            engine = "serial" if case in ("lenet", "resnet20") else "vector"
            command = [sys.executable, "-m", "benchmarks.memory", "--case", case, method, engine]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append(json.loads(output.splitlines()[-1]))
            print(rows[-1], flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump({"command": "python -m benchmarks.memory", "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
