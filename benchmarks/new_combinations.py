"""Counts unseen clients with a combination of classes that no training client has, and measures their accuracy.

For such clients, a method that learns from clients must extrapolate. The classes of a client depend only on the seed,
so counting needs no data. For CIFAR-10 at n=100, as in the paper:

    python -m benchmarks.new_combinations --clients 100 --classes 10 --each 2 --seeds 200

For given runs, it computes the test accuracy of unseen clients with a new combination, and that of the others:

    python -m benchmarks.new_combinations --runs runs/c10/seed-* --out results/new_combinations.json
    python -m benchmarks.new_combinations --show results/new_combinations.json

It can also use files of `pefll results add`, which have the number of right answers of each client. Then it also prints
the accuracy of seen clients of other seeds that have one of the new combinations, because these may simply be hard:

    python -m benchmarks.new_combinations --results results/cifar10-pefll-n100-*-client_lr_0.0005-bf16-seed*.json
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

from pefll.core.files import read_json, write_json
from pefll.core.tree import map_tree
from pefll.data.class_partition import by_class
from pefll.data.federation import Federation
from pefll.data.samples import TEST, Samples
from pefll.engines.hardware import device_name, make_engine, pick_hardware
from pefll.runs.federations import federation_of
from pefll.training.evaluation import client_scores
from pefll.training.run import load
from pefll.training.summary import commit

CLASSES = {"cifar10": 10, "cifar100": 100}
RATES = ("client_lr", "server_lr")


def is_new(federation: Federation) -> list[bool]:
    """Return for each unseen client whether its combination is new: no seen client has the same classes."""
    has = [tuple(row) for row in federation.histograms() > 0]
    seen = set(has[: federation.num_seen])
    return [one not in seen for one in has[federation.num_seen :]]


def dealt(clients: int, classes: int, each: int, seed: int) -> Federation:
    """Return a federation without real samples; its clients have the same classes as with any data of `classes`."""
    holders = -(-clients * each // classes)
    y = np.tile(np.arange(classes), 10 * holders)  # enough samples of each class for all clients that have it
    return by_class(Samples(np.zeros((len(y), 1), np.float32), y, classes), clients, each, seed)


def new_combinations(clients: int, classes: int, each: int, seed: int) -> int:
    """Return how many of a federation's unseen clients have a new combination of classes."""
    return sum(is_new(dealt(clients, classes, each, seed)))


def unseen_accuracies(path: Path, console: Console) -> dict[str, Any]:
    """Return the test accuracy of each unseen client of a run, its classes, and whether this combination is new."""
    run = load(path)
    federation = federation_of(run.config, console)
    hardware = pick_hardware(
        run.method.problem, run.config.device, run.config.engine, run.config.precision, run.config.processes
    )
    engine = make_engine(hardware, federation, run.method, run.config.seed, 0)
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


def unseen_in_result(path: Path) -> dict[str, Any]:
    """Return the same from a file of `pefll results add`, also for seen clients, but without masked accuracy."""
    result = read_json(path)
    scheme, _, each = str(result["partition"]).partition(" ")
    if scheme != "by-class" or result["dataset"] not in CLASSES or "client_counts" not in result:
        raise SystemExit(f"{path} is not of CIFAR dealt by class, or lacks the counts of each client")
    federation = dealt(result["num_clients"], CLASSES[result["dataset"]], int(each), result["seed"])
    has = [np.flatnonzero(histogram).tolist() for histogram in federation.histograms()]
    new = [False] * federation.num_seen + is_new(federation)
    counts = [result["client_counts"][group] for group in ("seen", "unseen")]
    samples, correct = (counts[0][name] + counts[1][name] for name in ("samples", "correct"))
    clients = [
        {"classes": classes, "new": new_one, "samples": all_, "accuracy": right / all_}
        for classes, new_one, all_, right in zip(has, new, samples, correct, strict=True)
    ]
    return {
        "data": result["dataset"],
        "method": result["method"],
        "settings": result["settings"],
        "precision": result["precision"],
        "seed": result["seed"],
        "device": result["device"],
        "clients": clients[federation.num_seen :],
        "seen": clients[: federation.num_seen],
    }


def show_runs(runs: list[dict[str, Any]], console: Console) -> None:
    """Print accuracies of new and of known combinations, for each run and over all runs that differ only by seed."""
    families: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        rates = ", ".join(f"{name} {run['settings'][name]}" for name in RATES if name in run["settings"])
        families.setdefault(f"{run['method']}, {run['precision']}, {rates}", []).append(run)
    for title, family in families.items():
        table = Table("seed", "unseen", "new: clients", "accuracy", "known: clients", "accuracy", title=title)
        everybody = [client for run in family for client in run["clients"]]
        runs = sorted(family, key=lambda run: int(run["seed"]))
        for seed, clients in [*((str(run["seed"]), run["clients"]) for run in runs), ("all", everybody)]:
            groups = [[client for client in clients if client["new"] is new] for new in (True, False)]
            table.add_row(
                seed, accuracy(clients), *(cell for group in groups for cell in (str(len(group)), accuracy(group)))
            )
        console.print(table)
        elsewhere = [
            other
            for run in family
            for new in {tuple(client["classes"]) for client in run["clients"] if client["new"]}
            for beside in family
            if beside is not run
            for other in beside.get("seen", [])
            if tuple(other["classes"]) == new
        ]
        if elsewhere:
            console.print(f"seen clients of the other seeds with one of these: {len(elsewhere)}, {accuracy(elsewhere)}")


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
    parser.add_argument("--results", type=Path, nargs="+", help="files of `pefll results add`")
    parser.add_argument("--out", type=Path, help="a JSON file for the accuracies of runs")
    parser.add_argument("--show", type=Path, help="only print what is in such a file")
    options = parser.parse_args()
    console = Console()
    if options.show:
        show_runs(read_json(options.show)["runs"], console)
        return
    if options.runs or options.results:
        runs = [unseen_accuracies(path, console) for path in track(options.runs or (), "runs", console=console)]
        runs += [unseen_in_result(path) for path in options.results or ()]
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
