"""How many unseen clients have a combination of classes that no training client has, and how do they fare?

That is where a method that learns from clients must extrapolate. Who has which classes depends only on the seed, so
that counting needs no data. For CIFAR-10 at n=100, as in the paper:

    python benchmarks/new_combinations.py --clients 100 --classes 10 --each 2 --seeds 200

With runs, the test accuracy of their unseen clients is split in two, those with a new combination and the others:

    python benchmarks/new_combinations.py --runs runs/c10/seed-* --out results/new_combinations.json
    python benchmarks/new_combinations.py --show results/new_combinations.json
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pefll.data.federation import TEST, Federation, Samples
from pefll.data.partition import by_class
from pefll.evaluation import client_scores
from pefll.files import read_json, write_json
from pefll.hardware import device_name, make_engine
from pefll.run import commit, federation_of, load
from pefll.tree import map_tree


def is_new(federation: Federation) -> list[bool]:
    """Return for each unseen client whether no seen client has the same classes."""
    has = [tuple(row) for row in federation.histograms() > 0]
    seen = set(has[: federation.num_seen])
    return [one not in seen for one in has[federation.num_seen :]]


def new_combinations(clients: int, classes: int, each: int, seed: int) -> int:
    """Return how many of a federation's unseen clients have classes that no seen client has together."""
    holders = -(-clients * each // classes)
    y = np.tile(np.arange(classes), 10 * holders)  # enough of each class for everybody who has it
    return sum(is_new(by_class(Samples(np.zeros((len(y), 1), np.float32), y, classes), clients, each, seed)))


def unseen_accuracies(path: Path, console: Console) -> dict[str, Any]:
    """Return test accuracies of a run's unseen clients, each with its classes and whether they are new together."""
    run = load(path)
    federation = federation_of(run.config, console)
    engine = make_engine(run.config, federation, run.method, 0)
    unseen = np.arange(federation.num_seen, federation.num_clients)
    try:
        server = map_tree(lambda leaf: leaf.to(engine.device), run.server)
        scores = client_scores(engine, run.method, server, unseen, TEST)
    finally:
        engine.close()
    histograms = federation.histograms()[unseen]
    return {
        "data": run.config.data,
        "method": run.config.method,
        "settings": run.config.settings,
        "precision": run.config.precision,
        "seed": run.config.seed,
        "device": device_name(engine.device),
        "clients": [
            {
                "classes": np.flatnonzero(histogram).tolist(),
                "new": new,
                "samples": int(samples),
                "accuracy": float(correct / samples),
                "masked": float(masked / samples),
            }
            for histogram, new, (samples, correct, masked, _) in zip(
                histograms, is_new(federation), scores, strict=True
            )
        ],
    }


def show_runs(runs: list[dict[str, Any]], console: Console) -> None:
    """Print accuracies of new and of known combinations, run by run and over all runs of a precision."""
    table = Table("precision", "seed", "unseen", "new: clients", "accuracy", "known: clients", "accuracy")
    rows = [(run["precision"], str(run["seed"]), run["clients"]) for run in runs]
    for precision in dict.fromkeys(run["precision"] for run in runs):
        mine = [client for run in runs if run["precision"] == precision for client in run["clients"]]
        rows.append((precision, "all", mine))
    for precision, seed, clients in rows:
        groups = [[client for client in clients if client["new"] is new] for new in (True, False)]
        table.add_row(
            precision,
            seed,
            accuracy(clients),
            *(cell for group in groups for cell in (str(len(group)), accuracy(group))),
        )
    console.print(table)


def accuracy(clients: list[dict[str, Any]]) -> str:
    """Return the accuracy per sample, in percent."""
    samples = sum(client["samples"] for client in clients)
    return (
        f"{100 * sum(client['accuracy'] * client['samples'] for client in clients) / samples:.1f}" if samples else "-"
    )


def main() -> None:
    """Count over seeds, or evaluate runs, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--each", type=int, default=2, help="classes of a client")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--runs", type=Path, nargs="+", help="folders of runs to evaluate")
    parser.add_argument("--out", type=Path, help="a JSON file for the accuracies of runs")
    parser.add_argument("--show", type=Path, help="only print what is in such a file")
    options = parser.parse_args()
    console = Console()
    if options.show:
        show_runs(read_json(options.show)["runs"], console)
        return
    if options.runs:
        runs = [unseen_accuracies(path, console) for path in track(options.runs, "runs", console=console)]
        show_runs(runs, console)
        if options.out:
            facts = {"commit": commit(), "finished": datetime.now(UTC).isoformat(timespec="seconds")}
            write_json(options.out, {**facts, "runs": runs})
        return
    counts = [
        new_combinations(options.clients, options.classes, options.each, seed)
        for seed in track(range(options.seeds), "seeds", console=console, transient=True)
    ]
    console.print(f"seeds 0 to 19: {counts[:20]}")
    shares = ", ".join(f"{number}: {share:.1%}" for number, share in enumerate(np.bincount(counts) / len(counts)))
    console.print(f"mean over {len(counts)} seeds: {np.mean(counts):.2f}; share of seeds with so many: {shares}")


if __name__ == "__main__":
    main()
