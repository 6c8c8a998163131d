"""Measures the accuracy of unseen clients if none of them has a combination of classes that no seen client has.

In by-class partitions, only unseen clients have some combinations of classes (`new_combinations.py`). Here each such
client is swapped with a seen client whose combination another seen client has, too. The clients, samples and seeds are
the same, but no unseen client has a new combination. If unseen clients are still worse, new combinations are not the
cause.

    python -m benchmarks.known_combinations --data-dir data --out results/known_combinations.json \
        --set client_lr=0.0005 --set server_lr=0.0005
    python -m benchmarks.known_combinations --data-dir data --rounds 5 --device cpu --seeds 0    # tries the script
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.new_combinations import is_new
from pefll import fit_seeds, load_samples, make_federation
from pefll.core.files import write_json
from pefll.data import Federation
from pefll.training.run import Run
from pefll.training.summary import commit


def with_known_only(federation: Federation) -> tuple[Federation, list[tuple[int, int]]]:
    """Return the federation in which unseen clients with new combinations are swapped with seen ones, and the swaps."""
    has = [tuple(row) for row in federation.histograms() > 0]
    holders = Counter(has[: federation.num_seen])
    order = list(range(federation.num_clients))
    pairs = []
    last = federation.num_seen
    for place, new in enumerate(is_new(federation), start=federation.num_seen):
        if not new or holders[has[place]]:  # the latter after a swap of a client with the same classes
            continue
        last = next(seen for seen in reversed(range(last)) if holders[has[seen]] > 1)
        holders[has[last]] -= 1
        holders[has[place]] += 1
        order[place], order[last] = last, place
        pairs.append((place, last))
    chosen = torch.tensor(order)
    changed = replace(federation, offset=federation.offset[:, chosen], count=federation.count[:, chosen])
    assert not any(is_new(changed))
    return changed, pairs


def about(run: Run, moved: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the figures of a run for the result file."""
    names = ("seed", "best_round", "accuracy", "client_counts", "precision", "device", "torch")
    return {name: run.summary[name] for name in names} | {"changed_places": moved}


def main() -> None:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="where CIFAR-10 lies")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", help="as in `pefll train`")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="hyper-parameters of PeFLL")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    console = Console()
    samples = load_samples("cifar10", options.data_dir)
    moved: dict[int, list[tuple[int, int]]] = {}

    def deal(seed: int) -> Federation:
        dealt = make_federation(samples, partition="by-class 2", clients=options.clients, seed=seed)
        changed, moved[seed] = with_known_only(dealt)
        return changed

    settings: dict[str, Any] = {name: float(value) for name, _, value in (pair.partition("=") for pair in options.set)}
    runs = fit_seeds(
        deal,
        "pefll",
        seeds=[int(seed) for seed in options.seeds.split(",")],
        model="lenet",
        rounds=options.rounds,
        console=console,
        embedding="convnet",
        device=options.device,
        precision=options.precision,
        **settings,
    )
    kept = [about(run, moved[run.config.seed]) for run in runs]
    for one in kept:
        best = one["accuracy"]["best"]
        seen, unseen = (100 * best[group]["per_sample"] for group in ("seen", "unseen"))
        console.print(
            f"seed {one['seed']}: {len(one['changed_places'])} changed places, seen {seen:.1f}, unseen {unseen:.1f}"
        )
    if options.out:
        facts = {"commit": commit(), "finished": datetime.now(UTC).isoformat(timespec="seconds")}
        write_json(options.out, {**facts, "rounds": options.rounds, "settings": settings, "runs": kept})


if __name__ == "__main__":
    main()
