"""How fast should a new client learn? Answered without a look at any new client.

Some methods let a new client train something of its own: an embedding, a head, a personal model. The rate and length of
that training cannot be chosen by the accuracy of clients that took part, who do something else, nor by unseen clients,
who must take no part in any choice. So here the seen clients of a finished run come as if they were new: each makes its
model as a new client would, and is scored on its validation samples. What they share was trained with their help, which
flatters all settings alike.


    python -m benchmarks.new_client_rates runs/hn --data-dir data --grid new_lr=0.01,0.03,0.1,0.3,1 \
        --out results/new_client_rates/cifar10-pfedhn-n100.json
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pefll.data import VALIDATION, Federation
from pefll.errors import PefllError
from pefll.evaluation import client_scores, summarise
from pefll.files import write_json
from pefll.hardware import device_name
from pefll.methods import build_method, typed_settings
from pefll.preparing import federation_of, opened
from pefll.run import Run, load
from pefll.summary import commit
from pefll.tree import map_tree


def try_settings(run: Run, federation: Federation, changes: dict[str, str], clients: int) -> dict[str, Any]:
    """Return how seen clients fare on their validation samples when they come as new ones.

    Args:
        run: a finished one.
        federation: that it was trained on.
        changes: hyper-parameters that are not the run's, as texts.
        clients: how many of them, the first ones.
    """
    config = run.config
    settings = {**config.settings, **typed_settings(config.method, changes)}
    method = build_method(config.method, run.method.problem, settings)
    chosen = np.arange(min(federation.num_seen, clients))
    strangers = replace(federation, num_seen=0)
    with opened(config, strangers, method, trains=False) as engine, engine.turn():
        server = map_tree(lambda leaf: leaf.to(engine.device), run.server)
        sums = client_scores(engine, method, server, chosen, VALIDATION)
        device = device_name(engine.device)
    accuracy = summarise(sums)
    if accuracy is None:
        raise PefllError("the run's clients have no validation samples")
    return {
        "settings": typed_settings(config.method, changes),
        "seed": config.seed,
        "clients": len(chosen),
        "device": device,
        "accuracy": accuracy._asdict(),
    }


def spoken(accuracy: dict[str, float]) -> str:
    """Return an accuracy per sample in per cent."""
    return f"{100 * accuracy['per_sample']:.1f}"


def main() -> None:
    """Try every setting on every run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs of one method")
    parser.add_argument("--grid", action="append", required=True, help="NAME=VALUE,VALUE,...; several make a grid")
    parser.add_argument("--data-dir", type=Path, help="where the data lies now, if it moved")
    parser.add_argument("--clients", type=int, default=1000, help="at most so many of them")
    parser.add_argument("--device", help="if not the run's")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    console = Console()
    grid = {name: texts.split(",") for name, _, texts in (word.partition("=") for word in options.grid)}
    settings = [dict(zip(grid, combination, strict=True)) for combination in itertools.product(*grid.values())]
    tried = []
    for path in options.runs:
        run = load(path)
        moved = {"device": options.device} if options.device else {}
        moved |= {"data_dir": str(options.data_dir)} if options.data_dir else {}
        run = replace(run, config=replace(run.config, **moved))
        federation = federation_of(run.config, console)
        tried += [
            try_settings(run, federation, changes, options.clients)
            for changes in track(settings, str(path), console=console)
        ]
    table = Table(*grid, "seed", "as if new, %")
    for row in tried:
        table.add_row(*(str(row["settings"][name]) for name in grid), str(row["seed"]), spoken(row["accuracy"]))
    console.print(table)
    if options.out:
        facts = {
            "what": "validation accuracy of seen clients that come as if they were new",
            "method": run.config.method,
            "run_settings": run.config.settings,
            "dataset": run.config.data,
            "num_clients": federation.num_clients,
            "commit": commit(),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, {**facts, "trials": tried})


if __name__ == "__main__":
    main()
