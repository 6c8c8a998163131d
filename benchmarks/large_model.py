"""Trains a client model of 10 million weights with PeFLL on a CPU: python -m benchmarks.large_model --out FILE.

One last layer of a hypernetwork would have 100 weights for each of them, and 64 GB with Adam's moments. Each choice of
a hypernetwork is trained in its own process, because the recorded peak of a process never falls.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import pefll
from pefll.core.files import write_json
from pefll.engines.hardware import peak_memory_bytes, processor
from pefll.engines.memory import MemoryPlan, parts_of
from pefll.training.summary import commit

PIXELS, CLASSES = 3072, 10
WIDTHS = (2400, 1100)
CLIENTS, EACH, PER_ROUND, STEPS = 20, 40, 2, 5
CHOICES = {"chunked": 1e-3, "low-rank": 2e-4}  # with the server's learning rate


def federation(pixels: int = PIXELS, seed: int = 0) -> pefll.Federation:
    """Return clients with noisy samples of two classes each."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(CLIENTS), EACH)
    y = (client + rng.integers(0, 2, len(client)) * 3) % CLASSES
    x = rng.standard_normal((CLASSES, pixels))[y] + 2 * rng.standard_normal((len(y), pixels))
    return pefll.federation_from_arrays(x.astype(np.float32), y, client, classes=CLASSES, name="noisy classes")


def client_model(pixels: int = PIXELS, widths: tuple[int, int] = WIDTHS) -> nn.Module:
    """Return a fully connected network."""
    first, second = widths
    layers = [nn.Linear(pixels, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, CLASSES)]
    return nn.Sequential(*layers)


def measure(choice: str, rounds: int, data: pefll.Federation, model: nn.Module) -> dict[str, Any]:
    """Train some rounds and return the weights, the peak memory of this process, and losses of seen clients."""
    started = time.perf_counter()
    run = pefll.fit(
        data,
        pefll.PeFLL(hypernetwork=choice, local_steps=STEPS, client_lr=5e-3, server_lr=CHOICES[choice]),
        model=model,
        rounds=rounds,
        eval_every=max(1, rounds - 1),  # the first round and the last
        clients_per_round=PER_ROUND,
        engine="serial",
        processes=1,
        device="cpu",
    )
    method: Any = run.method
    weights, networks = method.problem.model.size, method.h.size + method.phi.size
    plan = MemoryPlan(weights, networks, 1, PER_ROUND, STEPS, EACH, PIXELS)
    return {
        "hypernetwork": choice,
        "weights": weights,
        "server_weights": networks,
        "rounds": rounds,
        "estimated_gb": round(sum(parts_of(plan)) / 1e9, 2),
        "peak_gb": round(peak_memory_bytes(torch.device("cpu")) / 1e9, 2),
        "first_loss": round(run.history[0]["seen"]["loss"], 3),
        "last_loss": round(run.history[-1]["seen"]["loss"], 3),
        "unseen": round(run.summary["accuracy"]["best"]["unseen"]["per_sample"], 3),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    """Measure all choices, or the one that `--only` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", choices=CHOICES)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given.only, given.rounds, federation(), client_model())))
        return
    rows = []
    for choice in CHOICES:
        command = [sys.executable, "-m", "benchmarks.large_model", "--only", choice, "--rounds", str(given.rounds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    if given.out:
        record = {
            "command": f"python -m benchmarks.large_model --rounds {given.rounds}",
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"processor": processor(), "platform": platform.platform(), "torch": torch.__version__},
            "rows": rows,
        }
        write_json(given.out, record)


if __name__ == "__main__":
    main()
