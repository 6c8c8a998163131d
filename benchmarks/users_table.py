"""Trains on a generated table of users as it is: raw scales, categories and missing values.

    python -m benchmarks.users_table --out results/users_table.json

The table has 5,000 users with 3 to 2,000 rows, 30 numeric columns on scales from 0.01 to 1000, 3 categorical columns
and missing values. What a row's label depends on differs between groups of users. Each method gets the Parquet file by
one command of `pefll train`, and the accuracy is that on the test rows of unseen users.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from pefll.core.files import write_json

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
        numeric: number of numeric columns, at least 8.
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


def command(method: str, data: Path, out: Path, rounds: int, more: list[str]) -> list[str]:
    """Return the arguments of `pefll` that train a method on the Parquet file."""
    words = ["train", "--method", method, "--data", str(data), "--client-column", "user_id", "--label", "liked"]
    settings = [word for setting in METHODS[method] for word in ("--set", setting)]
    # Clients at once are faster, but not if each trains for as long as it has samples.
    engine = "serial" if method == "local" else "vector"
    words += ["--rounds", str(rounds), "--clients-per-round", "50", "--engine", engine, *settings]
    words += SCHEDULES.get(method, [])
    return [*words, *more, "--out", str(out)]


def main() -> None:
    """Write the table, train each method on it, and write their accuracies as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default="pefll,fedavg,local")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("more", nargs="*", help="more options of pefll train, after --")
    options = parser.parse_args()
    import pandas

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "users.parquet"
        table = users_table(options.users, seed=options.seed)
        pandas.DataFrame(table).to_parquet(data)
        facts = {"users": options.users, "rows": len(table["liked"]), "bytes": data.stat().st_size}
        del table
        for method in options.methods.split(","):
            words = command(method, data, Path(folder) / method, options.rounds, [*options.more, "--data-dir", folder])
            start = time.monotonic()
            subprocess.run([sys.executable, "-m", "pefll", *words], check=True)
            summary = json.loads((Path(folder) / method / "summary.json").read_text())
            shown = shlex.join(["pefll", *words]).replace(folder, ".")
            found[method] = {
                "command": shown,
                "seconds": round(time.monotonic() - start, 1),
                "accuracy": summary["accuracy"]["best"],
                "commit": summary.get("commit"),
                "device": summary.get("device"),
            }
            print(method, json.dumps(found[method]["accuracy"]), f"{found[method]['seconds']} s", flush=True)
    if options.out:
        repeat = shlex.join(["python", "-m", "benchmarks.users_table", *sys.argv[1:]])
        write_json(options.out, {"command": repeat, "table": facts, "rounds": options.rounds, "methods": found})


if __name__ == "__main__":
    main()
