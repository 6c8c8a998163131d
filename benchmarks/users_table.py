"""Trains on a generated table of users as it is: raw scales, categories and missing values.

    python -m benchmarks.users_table --out results/users_table.json     # again after Ctrl-C: it goes on where it was
    python -m benchmarks.users_table --table results/users_table.json   # the table again, in Markdown

The table has 5,000 users with 3 to 2,000 rows, 30 numeric columns on scales from 0.01 to 1000, 3 categorical columns
and missing values. What a row's label depends on differs between groups of users. Each method gets the Parquet file by
one command of `pefll train`, and the accuracy is that on the test rows of unseen users. A seed chooses the unseen
users, the splits, and all that is random in training; the table is the same for all seeds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from pefll.core.files import write_json, write_whole
from pefll.runs.titles import TITLES

# Whether users of a group like the first four columns. Over all groups, nothing is left for one model to learn.
_OPPOSITE = np.array([[1, 1, 1, 1], [-1, -1, -1, -1], [1, -1, 1, -1], [-1, 1, -1, 1]])
CITIES = ("Graz", "Linz", "Wien", "Bern", "Köln", "Ulm", "Paris", "Rome", "Turin", "Nice")
PLANS, DEVICES = ("free", "basic", "pro"), ("phone", "tablet", "laptop", "watch")
# The settings of docs/data.md for a table of thousands of users.
METHODS = {
    "pefll": ["client_lr=0.1", "server_lr=3e-3", "local_steps=5"],
    "fedavg": ["client_lr=0.05", "local_steps=10"],
    "local": ["client_lr=0.05", "epochs=15"],
}
SCHEDULES = {"pefll": ["--server-lr-schedule", "cosine"]}


def users_table(
    users: int = 5_000,
    numeric: int = 30,
    seed: int = 0,
    *,
    groups: int = 4,
    least: int = 3,
    most: int = 2_000,
    missing: float = 0.05,
) -> dict[str, list[Any]]:
    """Return the columns of a table with the label `liked`, the client `user_id`, and `numeric` + 3 features.

    Args:
        users: number of users.
        numeric: number of numeric columns, at least 4.
        seed: seed of all random draws.
        groups: number of groups of users, 2 or 4. Users of a group decide alike.
        least: least rows of a user.
        most: most rows of a user.
        missing: share of the features' cells that are empty.
    """
    rng = np.random.default_rng(seed)
    rows = np.clip(np.exp(rng.normal(np.log(40), 1.0, users)), least, most).astype(int)
    rows[:2] = least, most
    owner = np.repeat(np.arange(users), rows)
    total = len(owner)
    plain = rng.normal(size=(total, numeric)) + 0.3 * rng.normal(size=(users, numeric))[owner]
    scales, offsets = 10 ** np.linspace(-2, 3, numeric), rng.normal(size=numeric)
    cells = [scales[column] * (plain[:, column] + offsets[column]) for column in range(numeric)]
    texts = [rng.integers(0, len(values), total) for values in (CITIES, PLANS, DEVICES)]
    group = rng.integers(0, groups, users)[owner]
    # All users agree on some columns. Those of a group weigh the first columns, and their plan, in their own way.
    of_all = rng.normal(size=numeric) / np.sqrt(numeric)
    of_group = _OPPOSITE[:groups] * rng.normal(1, 0.2, size=(groups, 4))
    score = plain @ of_all + (plain[:, :4] * of_group[group]).sum(axis=1)
    score += rng.normal(size=len(CITIES))[texts[0]] / 2 + rng.normal(size=(groups, len(PLANS)))[group, texts[1]]
    liked = score + 0.3 * rng.normal(size=total) > 0
    table: dict[str, list[Any]] = {"user_id": [f"user-{user:05}" for user in owner.tolist()]}
    for column, values in enumerate(cells):
        gap = rng.random(total) < missing
        table[f"number_{column}"] = [
            None if empty else value for empty, value in zip(gap, values.tolist(), strict=True)
        ]
    for name, names, codes in zip(("city", "plan", "device"), (CITIES, PLANS, DEVICES), texts, strict=True):
        gap = rng.random(total) < missing
        table[name] = [None if empty else names[code] for empty, code in zip(gap, codes.tolist(), strict=True)]
    table["liked"] = np.where(liked, "yes", "no").tolist()
    return table


def command(method: str, data: Path, rounds: int, seed: int, more: list[str]) -> list[str]:
    """Return the arguments of `pefll` that train a method on the Parquet file; the folder of the run must follow."""
    words = ["train", "--method", method, "--data", str(data), "--client-column", "user_id", "--label", "liked"]
    settings = [word for setting in METHODS[method] for word in ("--set", setting)]
    # Clients at once are faster, but not if each trains for as long as it has samples.
    engine = "serial" if method == "local" else "vector"
    words += ["--rounds", str(rounds), "--clients-per-round", "50", "--engine", engine, "--seed", str(seed), *settings]
    return [*words, *SCHEDULES.get(method, []), *more]


def trained(method: str, seed: int, data: Path, rounds: int, more: list[str]) -> dict[str, Any]:
    """Train a method in a folder beside the data, or go on there, and return what to record of the run."""
    work = data.parent
    folder = work / f"{method}-{seed}"
    words = command(method, data, rounds, seed, [*more, "--data-dir", str(work)])
    # A run that is in the folder already must have the same settings, or `pefll train` refuses to resume it.
    place = "--resume" if (folder / "config.toml").exists() else "--out"
    subprocess.run([sys.executable, "-m", "pefll", *words, place, str(folder)], check=True)
    summary = json.loads((folder / "summary.json").read_text())
    shown = shlex.join(["pefll", *words, "--out", str(folder)]).replace(str(work), ".")
    kept = {name: summary.get(name) for name in ("commit", "device")}
    return {"seed": seed, "command": shown, "accuracy": summary["accuracy"]["best"]} | kept


def table(methods: dict[str, list[dict[str, Any]]]) -> str:
    """Return the accuracies on seen and unseen users as Markdown, mean and deviation over the seeds."""
    lines = ["| | seen users | unseen users | seeds |", "| --- | ---: | ---: | ---: |"]
    for method, runs in methods.items():
        cells = []
        for group in ("seen", "unseen"):
            found = [100 * run["accuracy"][group]["per_sample"] for run in runs]
            cells.append(f"{mean(found):.1f}% ± {stdev(found):.1f}" if len(found) > 1 else f"{found[0]:.1f}%")
        lines.append(f"| {TITLES[method]} | {' | '.join(cells)} | {len(runs)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the table of users, train each method on it with each seed, and write their accuracies as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--work", type=Path, default=Path("runs"), help="the folder of the runs, which are kept there")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--table", type=Path, help="a file written by --out, whose table is printed")
    parser.add_argument("more", nargs="*", help="more options of pefll train, after --")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["methods"]))
        return
    import pandas

    data = options.work.resolve() / f"users-table-{options.users}" / "users.parquet"
    data.parent.mkdir(parents=True, exist_ok=True)
    if not data.exists():
        write_whole(data, pandas.DataFrame(users_table(options.users)).to_parquet())
    rows = len(pandas.read_parquet(data, columns=["liked"]))
    place = ["--work", str(options.work)]  # says nothing about the figures
    given = shlex.join(["python", "-m", "benchmarks.users_table", *sys.argv[1:]])
    content: dict[str, Any] = {
        "command": given.replace(f" {shlex.join(place)}", ""),
        "table": {"users": options.users, "rows": rows},
        "rounds": options.rounds,
        "methods": {},
    }
    for method in options.methods.split(","):
        for seed in map(int, options.seeds.split(",")):
            run = trained(method, seed, data, options.rounds, options.more)
            content["methods"].setdefault(method, []).append(run)
            print(method, seed, json.dumps(run["accuracy"]["unseen"]), flush=True)
            if options.out:
                write_json(options.out, content)
    print(table(content["methods"]))


if __name__ == "__main__":
    main()
