"""Compares methods on a real regression, from a raw CSV by one command each; `diabetes` and `wages` are studies."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from pefll.core.files import write_json
from pefll.runs.titles import TITLES

SEEDS = (0, 1, 2)


class Study(NamedTuple):
    """A table and how methods are trained on it.

    Attributes:
        name: name of the CSV and of the benchmark's module.
        write: writes the raw CSV to a path.
        words: arguments of `pefll train` that all methods share.
        methods: settings of each method, as `--set` takes them.
        columns: for each choice of columns, the arguments that make it.
        digits: digits after the point of the table's errors.
    """

    name: str
    write: Callable[[Path], None]
    words: Sequence[str]
    methods: Mapping[str, Sequence[str]]
    columns: Mapping[str, Sequence[str]]
    digits: int


def command(study: Study, method: str, data: Path, seed: int, *more: str) -> list[str]:
    """Return the arguments of `pefll` that train a method on the CSV; the folder of the run must follow."""
    words = ["train", "--method", method, "--data", str(data), "--data-dir", str(data.parent), *study.words]
    settings = [word for setting in study.methods[method] for word in ("--set", setting)]
    return [*words, "--engine", "vector", "--seed", str(seed), *settings, *more]


def trained(study: Study, method: str, seed: int, data: Path, more: Sequence[str]) -> dict[str, Any]:
    """Train a method and return what to record of the run."""
    folder = data.parent / f"{method}-{seed}-{len(more)}"
    words = [*command(study, method, data, seed, *more), "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "pefll", *words], check=True, capture_output=True)
    summary = json.loads((folder / "summary.json").read_text())
    shown = shlex.join(["pefll", *words]).replace(str(data.parent), ".")
    best = {group: summary["metrics"]["best"][group] for group in ("seen", "unseen")}
    return {"seed": seed, "command": shown, "metrics": best, "commit": summary["commit"]}


def table(study: Study, found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Return the RMSE of each method as Markdown, mean and deviation over the seeds."""
    lines = ["| columns | method | seen clients, RMSE | unseen clients, RMSE |", "| --- | --- | ---: | ---: |"]
    for columns, methods in found.items():
        for method, runs in methods.items():
            errors = [[run["metrics"][group]["rmse"] for run in runs] for group in ("seen", "unseen")]
            cells = " | ".join(f"{mean(each):.{study.digits}f} ± {stdev(each):.{study.digits}f}" for each in errors)
            lines.append(f"| {columns} | {TITLES[method]} | {cells} |")
    return "\n".join(lines)


def main(study: Study, about: str | None) -> None:
    """Write the CSV, train each method on it with each seed, and write their errors as JSON."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--table", type=Path, help="a file written by --out, whose table is printed")
    parser.add_argument("--csv", type=Path, help="write the raw CSV there, and do nothing else")
    options = parser.parse_args()
    if options.table:
        print(table(study, json.loads(options.table.read_text())["columns"]))
        return
    if options.csv:
        study.write(options.csv)
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / f"{study.name}.csv"
        study.write(data)
        for columns, more in study.columns.items():
            for method in study.methods:
                runs = [trained(study, method, seed, data, more) for seed in SEEDS]
                found.setdefault(columns, {})[method] = runs
                print(columns, method, [round(run["metrics"]["unseen"]["rmse"], 3) for run in runs], flush=True)
    if options.out:
        write_json(options.out, {"command": f"python -m benchmarks.{study.name} --out FILE", "columns": found})
    print(table(study, found))
