"""Measures how the descriptor's size changes PeFLL's accuracy: python -m benchmarks.descriptor_size --out FILE.

The federations are generated tables. Every client has a hidden vector of a few numbers, its taste, which decides how
the client's labels depend on the features. So a descriptor needs about as many numbers as the taste has, however many
clients there are. The tables differ in the number of clients and in the length of the taste. All runs use the vector
engine on a CPU, the same rounds, and the same clients per round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pefll
from pefll.core.files import write_json
from pefll.engines.hardware import processor
from pefll.experiments.pages import markdown_table
from pefll.training.summary import commit

FEATURES, CLASSES = 16, 4
FEWEST_ROWS, MOST_ROWS = 20, 120
SIZES = (4, 16, 64, 251)
PLACE = ("clients", "taste", "descriptor_size", "seed")
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
    """Return the test accuracies of one run, and the bytes that a client sends and receives in a round."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    run = pefll.fit(table(clients, taste, seed), "pefll", seed=seed, rounds=rounds, descriptor_size=size, **SETTINGS)
    best = run.summary["accuracy"]["best"]
    sent = run.summary["bytes_down"] + run.summary["bytes_up"]
    return {
        "clients": clients,
        "taste": taste,
        "descriptor_size": size,
        "seed": seed,
        "rounds": rounds,
        "seen": round(best["seen"]["per_sample"], 4),
        "unseen": round(best["unseen"]["per_sample"], 4),
        "bytes": round(sent / (rounds * SETTINGS["clients_per_round"])),
        "seconds": round(time.perf_counter() - started, 1),
    }


def finished(path: Path | None, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a file that was made with the same settings, to go on after them."""
    if path is None or not path.exists():
        return []
    known = json.loads(path.read_text())
    if known.get("settings") != record["settings"]:
        raise SystemExit(f"{path} was made with other settings: name another file with --out")
    rows: list[dict[str, Any]] = known["rows"]
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the unseen clients' accuracies, mean ± standard deviation over seeds, and of bytes."""
    sizes = sorted({row["descriptor_size"] for row in rows})
    lines: list[list[str]] = []
    for clients, taste in sorted({(row["clients"], row["taste"]) for row in rows}):
        mine = [row for row in rows if (row["clients"], row["taste"]) == (clients, taste)]
        lines.append([f"{clients:,}", str(taste), *(_figure(mine, size) for size in sizes)])
    for clients in sorted({row["clients"] for row in rows}):
        sent = {row["descriptor_size"]: row["bytes"] for row in rows if row["clients"] == clients}
        kilobytes = [f"{sent[size] / 1e3:.0f} kB" if size in sent else "" for size in sizes]
        lines.append([f"{clients:,}", "kilobytes", *kilobytes])
    return markdown_table(["clients", "hidden numbers", *(f"{size:,}" for size in sizes)], lines)


def _figure(rows: Sequence[dict[str, Any]], size: int) -> str:
    """Return the mean over seeds in percent, with the standard deviation where there are several."""
    found = [100 * row["unseen"] for row in rows if row["descriptor_size"] == size]
    if not found:
        return ""
    return f"{np.mean(found):.1f}" + (f" ± {np.std(found, ddof=1):.1f}" if len(found) > 1 else "")


def main() -> None:
    """Measure all sizes, and the paper's size 1 + n/4, for each number of clients, taste and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--tastes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file; a stopped measurement goes on from it")
    given = parser.parse_args()
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.descriptor_size", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "platform": platform.platform(), "torch": torch.__version__},
        "settings": SETTINGS | {"rounds": given.rounds},
    }
    rows = finished(given.out, record)
    done = {tuple(row[name] for name in PLACE) for row in rows}
    # All settings of a seed come before the next seed, so that a stopped measurement has whole seeds.
    wanted = [
        (clients, taste, size, seed)
        for seed in given.seeds
        for clients in given.clients
        for taste in given.tastes
        for size in (*given.sizes, int(1 + clients / 4))
        if (clients, taste, size, seed) not in done
    ]
    with ProcessPoolExecutor(given.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job in as_completed([pool.submit(measure, *one, given.rounds) for one in dict.fromkeys(wanted)]):
            rows.append(job.result())
            print(rows[-1], flush=True)
            rows.sort(key=lambda row: tuple(row[name] for name in PLACE))
            if given.out:
                write_json(given.out, record | {"rows": rows})
    print("\n".join(markdown(rows)))


if __name__ == "__main__":
    main()
