"""How many unseen clients have a combination of classes that no training client has?

That is where a method that learns from clients must extrapolate. Who has which classes depends only on the seed, so
that no data is needed. For CIFAR-10 at n=100, as in the paper:

    python benchmarks/new_combinations.py --clients 100 --classes 10 --each 2 --seeds 200
"""

from __future__ import annotations

import argparse

import numpy as np
from rich.console import Console
from rich.progress import track

from pefll.data.federation import Samples
from pefll.data.partition import by_class


def new_combinations(clients: int, classes: int, each: int, seed: int) -> int:
    """Return how many of a federation's unseen clients have classes that no seen client has together."""
    holders = -(-clients * each // classes)
    y = np.tile(np.arange(classes), 10 * holders)  # enough of each class for everybody who has it
    federation = by_class(Samples(np.zeros((len(y), 1), np.float32), y, classes), clients, each, seed)
    has = [tuple(row) for row in federation.histograms() > 0]
    seen = set(has[: federation.num_seen])
    return sum(one not in seen for one in has[federation.num_seen :])


def main() -> None:
    """Count over seeds, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--each", type=int, default=2, help="classes of a client")
    parser.add_argument("--seeds", type=int, default=200)
    options = parser.parse_args()
    console = Console()
    counts = [
        new_combinations(options.clients, options.classes, options.each, seed)
        for seed in track(range(options.seeds), "seeds", console=console, transient=True)
    ]
    console.print(f"seeds 0 to 19: {counts[:20]}")
    shares = ", ".join(f"{number}: {share:.1%}" for number, share in enumerate(np.bincount(counts) / len(counts)))
    console.print(f"mean over {len(counts)} seeds: {np.mean(counts):.2f}; share of seeds with so many: {shares}")


if __name__ == "__main__":
    main()
