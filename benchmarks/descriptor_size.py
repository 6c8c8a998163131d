"""Measures how the descriptor's size changes PeFLL's accuracy: python -m benchmarks.descriptor_size --out FILE.

The federations are generated tables. Every client has a hidden vector of a few numbers, its taste, which decides how
the client's labels depend on the features. So a descriptor needs about as many numbers as the taste has, however many
clients there are. The tables differ in the number of clients and in the length of the taste. All runs use the vector
engine on a CPU, the same rounds, and the same clients per round.
"""

from __future__ import annotations

import argparse
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pefll
from pefll.core.files import write_json
from pefll.engines.hardware import processor
from pefll.training.summary import commit

FEATURES, CLASSES = 16, 4
FEWEST_ROWS, MOST_ROWS = 20, 120
SIZES = (4, 8, 16, 32, 64)
SETTINGS: dict[str, Any] = {
    "local_steps": 10,
    "client_lr": 2e-2,
    "server_lr": 1e-3,
    "clients_per_round": 50,
    "eval_every": 50,
    "eval_clients": 200,
    "model": "mlp",
    "engine": "vector",
    "device": "cpu",
}


def table(clients: int, taste: int, seed: int) -> pefll.Federation:
    """Return a generated table with one client per user and a tenth of the users unseen.

    A user's classes have the scores (A + Σ_k t_k B_k) x, where t [taste] belongs to the user, and A and B [taste] are
    matrices [classes, features] of the whole table.
    """
    rng = np.random.default_rng([seed, clients, taste])
    rows = rng.integers(FEWEST_ROWS, MOST_ROWS + 1, clients)
    owner = np.repeat(np.arange(clients), rows)
    x = rng.standard_normal((len(owner), FEATURES)).astype(np.float32)
    common = rng.standard_normal((CLASSES, FEATURES)).astype(np.float32)
    personal = rng.standard_normal((taste, CLASSES, FEATURES)).astype(np.float32)
    tastes = (2 * rng.standard_normal((clients, taste)) / taste**0.5).astype(np.float32)
    of_client = common + np.einsum("nk,kcf->ncf", tastes, personal)
    y = np.einsum("ncf,nf->nc", of_client[owner], x).argmax(axis=1)
    return pefll.federation_from_arrays(x, y, owner, classes=CLASSES, name=f"taste of {taste}", seed=seed)


def measure(clients: int, taste: int, size: int, seed: int, rounds: int) -> dict[str, Any]:
    """Return the test accuracies of one run."""
    started = time.perf_counter()
    run = pefll.fit(table(clients, taste, seed), "pefll", seed=seed, rounds=rounds, descriptor_size=size, **SETTINGS)
    best = run.summary["accuracy"]["best"]
    return {
        "clients": clients,
        "taste": taste,
        "descriptor_size": size,
        "seed": seed,
        "seen": round(best["seen"]["per_sample"], 4),
        "unseen": round(best["unseen"]["per_sample"], 4),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    """Measure all sizes, and the paper's size 1 + n/4, for each number of clients, taste and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--tastes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = {
        "command": f"python -m benchmarks.descriptor_size --rounds {given.rounds}",
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "platform": platform.platform(), "torch": torch.__version__},
        "settings": SETTINGS | {"rounds": given.rounds},
    }
    rows: list[dict[str, Any]] = []
    for seed in given.seeds:
        for clients in given.clients:
            for taste in given.tastes:
                for size in (*given.sizes, int(1 + clients / 4)):
                    rows.append(measure(clients, taste, size, seed, given.rounds))
                    print(rows[-1], flush=True)
                    if given.out:
                        write_json(given.out, record | {"rows": rows})


if __name__ == "__main__":
    main()
