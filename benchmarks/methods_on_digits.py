"""Compares all methods on the bundled digits: accuracy on seen and unseen clients, and what a new client pays.

    python -m benchmarks.methods_on_digits --out results/methods_on_digits.json     # about two minutes on one core
    python -m benchmarks.methods_on_digits --table results/methods_on_digits.json   # the table again, in Markdown

The clients are those of `pefll demo`: 100 clients with about ten training samples each, of which 30 are unseen. All
methods train the same model for the same number of rounds, with ten local steps or as many meta-steps. Each method gets
the learning rate that is best on the validation samples of seen clients of seed 0. This is a quick comparison of
methods with few settings searched, not a ranking: Table 1 (docs/results.md) searches more, on the paper's data.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pefll
from pefll.core.files import write_whole
from pefll.experiments.demo import clients
from pefll.training.cost import cost_of_median_client
from pefll.training.summary import commit

MODEL, ROUNDS, PER_ROUND, STEPS = "tiny", 100, 10, 10
RATES = (0.02, 0.1)
# Settings of a method, given the learning rate r of its clients. Others have ten local steps, and r as their client_lr.
OWN: dict[str, Any] = {
    "pefll": lambda r: {"client_lr": r, "local_steps": STEPS, "server_lr": 2e-3},
    "pefll-prior": lambda r: {"client_lr": r, "local_steps": STEPS, "server_lr": 2e-3},
    "pefll-plus": lambda r: {"client_lr": r, "local_steps": STEPS, "server_lr": 2e-3},
    "odpfl-hn": lambda r: {"client_lr": r, "local_steps": STEPS, "server_lr": 2e-3},
    "pfedme": lambda r: {"personal_lr": r, "client_lr": 0.03, "local_rounds": STEPS},
    "ditto": lambda r: {"client_lr": r, "personal_lr": r, "global_steps": STEPS, "personal_steps": STEPS},
    "apfl": lambda r: {"client_lr": r, "mixed_steps": STEPS},
    "fedrep": lambda r: {"client_lr": r},
    "fedbabu": lambda r: {"client_lr": r, "tune_lr": r, "local_steps": STEPS},
    "per-fedavg": lambda r: {"client_lr": r, "inner_lr": r, "meta_steps": STEPS},
    "local": lambda r: {"client_lr": r},
}


def settings_of(method: str, rate: float) -> dict[str, Any]:
    """Return the settings of a method for a learning rate of its clients."""
    make = OWN.get(method, lambda r: {"client_lr": r, "local_steps": STEPS})
    return make(rate)  # type: ignore[no-any-return]


def train(method: str, rate: float, seed: int, rounds: int) -> pefll.Run:
    """Train a method on the federation of a seed."""
    return pefll.fit(
        clients(seed),
        method,
        model=MODEL,
        rounds=rounds,
        seed=seed,
        clients_per_round=PER_ROUND,
        eval_every=max(1, rounds // 4),
        device="cpu",
        **settings_of(method, rate),
    )


def validation(run: pefll.Run) -> float:
    """Return the accuracy of a run on the validation samples of seen clients."""
    seen = run.evaluate("validation").seen
    assert seen is not None
    return float(seen.per_sample)


def measure(method: str, seeds: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return a method's row: its rate, its accuracies in per cent for each seed, and the cost of a new client."""
    trials = {rate: train(method, rate, 0, rounds) for rate in RATES}
    rate = max(trials, key=lambda each: validation(trials[each]))
    runs = [trials[rate], *(train(method, rate, seed, rounds) for seed in range(1, seeds))]
    accuracies: dict[str, list[float]] = {
        group: [round(100 * run.summary["accuracy"]["best"][group]["per_sample"], 2) for run in runs]
        for group in ("seen", "unseen")
    }
    cost = cost_of_median_client(runs[0].method, clients(0))._asdict()
    cost.pop("seconds")  # it differs from run to run
    return {"method": method, "settings": settings_of(method, rate), **accuracies, "cost": cost}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, the best on unseen clients first."""
    lines = ["| method | seen, % | unseen, % | exchanges | kB down | kB up | MFLOP |", "| --- | " + "--- | " * 6]
    for row in sorted(rows, key=lambda each: -mean(each["unseen"])):
        cost = row["cost"]
        sent = [f"{cost[key] / 1000:.1f}" for key in ("bytes_down", "bytes_up")]
        cells = [f"`{row['method']}`", _spread(row["seen"]), _spread(row["unseen"]), str(cost["exchanges"]), *sent]
        lines.append("| " + " | ".join([*cells, f"{cost['flops'] / 1e6:.1f}"]) + " |")
    return "\n".join(line.rstrip() for line in lines)


def _spread(values: list[float]) -> str:
    return f"{mean(values):.1f} ± {stdev(values) if len(values) > 1 else 0:.1f}"


def main() -> None:
    """Train all methods, or print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--table", type=Path, help="a file written by --out, whose table is printed")
    parser.add_argument("--methods", default=",".join(pefll.METHODS), help="such as pefll,fedavg")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]))
        return
    rows = []
    for method in options.methods.split(","):
        rows.append(measure(method, options.seeds))
        print(json.dumps(rows[-1]), flush=True)
    made_by = {"command": "python -m benchmarks.methods_on_digits --out FILE", "commit": commit()}
    protocol = {"model": MODEL, "rounds": ROUNDS, "clients_per_round": PER_ROUND, "seeds": options.seeds}
    if options.out:
        content = json.dumps(made_by | protocol | {"rows": rows}, indent=1) + "\n"
        write_whole(options.out, content.encode())
    print(table(rows))


if __name__ == "__main__":
    main()
