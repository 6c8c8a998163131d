"""Compares methods on a real regression, from a raw CSV by one command each: scikit-learn's patients with diabetes.

    python -m benchmarks.diabetes --out results/diabetes.json     # about five minutes on one core
    python -m benchmarks.diabetes --table results/diabetes.json   # the table again, in Markdown

The label is the progression of the disease after a year. The CSV has the columns as they were measured: years,
millimetres of mercury, milligrams. A client is an age group of one sex. So clients differ in their patients, but hardly
in how the disease progresses. Settings are those that `pefll tune --hold-out 0.2` chose with seeds 0 to 2, on
validation samples of seen clients that did not train:

    pefll tune --data diabetes.csv ... --method fedavg --grid client_lr=0.005,0.02,0.05 --grid local_steps=2,5,10
    pefll tune --data diabetes.csv ... --method pefll --grid client_lr=0.005,0.02,0.05 --grid local_steps=2,5,10 \
        --grid server_lr=1e-3,3e-3, and then --grid descriptor_size=1,4 --grid embedding=linear,mlp
    pefll tune --data diabetes.csv ... --method local --grid client_lr=0.001,0.005,0.02 --grid epochs=5,20,50
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pefll.core.files import write_json
from pefll.runs.titles import TITLES

METHODS = {
    "pefll": ["client_lr=0.02", "local_steps=2", "server_lr=3e-3", "descriptor_size=1", "embedding=linear"],
    "fedavg": ["client_lr=0.005", "local_steps=5"],
    "local": ["client_lr=0.001", "epochs=50"],
}
# What the clients' models see: all columns, or all but those that make the clients.
COLUMNS: dict[str, list[str]] = {"all columns": [], "without age and sex": ["--drop", "age,sex"]}
SEEDS = (0, 1, 2)


def write_table(path: Path) -> None:
    """Write scikit-learn's data as a raw CSV, with a column `group` for the clients."""
    from sklearn.datasets import load_diabetes

    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame["sex"] = frame["sex"].map({1.0: "a", 2.0: "b"})  # the data set does not say which is which
    frame["group"] = frame["sex"] + (frame["age"] // 5 * 5).astype(int).astype(str)
    frame.to_csv(path, index=False)


def command(method: str, data: Path, seed: int, rounds: int = 200) -> list[str]:
    """Return the arguments of `pefll` that train a method on the CSV; the folder of the run must follow."""
    words = ["train", "--method", method, "--data", str(data), "--data-dir", str(data.parent)]
    words += ["--client-column", "group", "--label", "target", "--task", "regression"]
    words += ["--unseen", "0.25", "--min-samples", "5", "--rounds", str(rounds), "--clients-per-round", "5"]
    words += ["--eval-every", "20", "--engine", "vector", "--seed", str(seed)]
    return [*words, *(word for setting in METHODS[method] for word in ("--set", setting))]


def trained(method: str, seed: int, data: Path, more: list[str]) -> dict[str, Any]:
    """Train a method and return what to record of the run."""
    folder = data.parent / f"{method}-{seed}-{len(more)}"
    words = [*command(method, data, seed), *more, "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "pefll", *words], check=True, capture_output=True)
    summary = json.loads((folder / "summary.json").read_text())
    shown = shlex.join(["pefll", *words]).replace(str(data.parent), ".")
    best = {group: summary["metrics"]["best"][group] for group in ("seen", "unseen")}
    return {"seed": seed, "command": shown, "metrics": best, "commit": summary["commit"]}


def table(found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Return the RMSE of each method as Markdown, mean and deviation over the seeds."""
    lines = ["| columns | method | seen clients, RMSE | unseen clients, RMSE |", "| --- | --- | ---: | ---: |"]
    for columns, methods in found.items():
        for method, runs in methods.items():
            errors = [[run["metrics"][group]["rmse"] for run in runs] for group in ("seen", "unseen")]
            cells = " | ".join(f"{mean(each):.1f} ± {stdev(each):.1f}" for each in errors)
            lines.append(f"| {columns} | {TITLES[method]} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Write the CSV, train each method on it with each seed, and write their errors as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--table", type=Path, help="a file written by --out, whose table is printed")
    parser.add_argument("--csv", type=Path, help="write the raw CSV there, and do nothing else")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["columns"]))
        return
    if options.csv:
        write_table(options.csv)
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "diabetes.csv"
        write_table(data)
        for columns, more in COLUMNS.items():
            for method in METHODS:
                runs = [trained(method, seed, data, more) for seed in SEEDS]
                found.setdefault(columns, {})[method] = runs
                print(columns, method, [round(run["metrics"]["unseen"]["rmse"], 1) for run in runs], flush=True)
    if options.out:
        write_json(options.out, {"command": "python -m benchmarks.diabetes --out FILE", "columns": found})
    print(table(found))


if __name__ == "__main__":
    main()
