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

OURS = "pefll"

# What is recorded of each run, for each setup and method.
Found = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]


class Setup(NamedTuple):
    """One way to train on a table.

    Attributes:
        methods: settings of each method, as `--set` takes them.
        words: arguments of `pefll train` that only this setup has.
    """

    methods: Mapping[str, Sequence[str]]
    words: Sequence[str] = ()


class Study(NamedTuple):
    """A table and how methods are trained on it.

    Attributes:
        name: name of the CSV and of the benchmark's module.
        write: writes the raw CSV to a path.
        words: arguments of `pefll train` that all runs share.
        varied: what setups differ in, the head of the tables' first column.
        setups: setups by name.
        seeds: the seeds of all runs.
        digits: digits after the point of the tables' errors.
    """

    name: str
    write: Callable[[Path], None]
    words: Sequence[str]
    varied: str
    setups: Mapping[str, Setup]
    seeds: Sequence[int]
    digits: int


def command(study: Study, setup: str, method: str, data: Path, seed: int) -> list[str]:
    """Return the arguments of `pefll` that train a method on the CSV; the folder of the run must follow."""
    words = ["train", "--method", method, "--data", str(data), "--data-dir", str(data.parent), *study.words]
    methods, own = study.setups[setup]
    settings = [word for setting in methods[method] for word in ("--set", setting)]
    return [*words, "--engine", "vector", "--seed", str(seed), *settings, *own]


def trained(study: Study, setup: str, method: str, seed: int, data: Path) -> dict[str, Any]:
    """Train a method and return what to record of the run."""
    folder = data.parent / f"{setup}-{method}-{seed}".replace(" ", "-")
    words = [*command(study, setup, method, data, seed), "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "pefll", *words], check=True, capture_output=True)
    summary = json.loads((folder / "summary.json").read_text())
    shown = shlex.join(["pefll", *words]).replace(str(data.parent), ".")
    best = {group: summary["metrics"]["best"][group] for group in ("seen", "unseen")}
    return {"seed": seed, "command": shown, "metrics": best, "commit": summary["commit"]}


def errors(runs: Sequence[Mapping[str, Any]], group: str) -> list[float]:
    """Return each run's RMSE on the clients of a group."""
    return [run["metrics"][group]["rmse"] for run in runs]


def table(study: Study, found: Found) -> str:
    """Return the RMSE of each method as Markdown, mean and deviation over the seeds."""
    lines = [f"| {study.varied} | method | seen clients, RMSE | unseen clients, RMSE |", "| --- | --- | ---: | ---: |"]
    for setup, methods in found.items():
        for method, runs in methods.items():
            each = [errors(runs, group) for group in ("seen", "unseen")]
            cells = " | ".join(f"{mean(one):.{study.digits}f} ± {stdev(one):.{study.digits}f}" for one in each)
            lines.append(f"| {setup} | {TITLES[method]} | {cells} |")
    return "\n".join(lines)


def differences(study: Study, found: Found) -> str:
    """Return, as Markdown, how much larger PeFLL's RMSE on the unseen clients is than each other method's, by seed."""
    lines = [f"| {study.varied} | PeFLL minus | mean | each seed |", "| --- | --- | ---: | --- |"]
    for setup, methods in found.items():
        ours = errors(methods[OURS], "unseen")
        for method in methods:
            if method != OURS:
                more = [a - b for a, b in zip(ours, errors(methods[method], "unseen"), strict=True)]
                cells = [f"{one:+.{study.digits}f}" for one in (mean(more), *more)]
                lines.append(f"| {setup} | {TITLES[method]} | {cells[0]} | {', '.join(cells[1:])} |")
    return "\n".join(lines)


def main(study: Study, about: str | None) -> None:
    """Write the CSV, train each method on it with each seed, and write their errors as JSON."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--table", type=Path, help="a file written by --out, whose tables are printed")
    parser.add_argument("--csv", type=Path, help="write the raw CSV there, and do nothing else")
    options = parser.parse_args()
    if options.csv:
        study.write(options.csv)
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    if options.table:
        found = json.loads(options.table.read_text())["setups"]
    else:
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / f"{study.name}.csv"
            study.write(data)
            for setup, (methods, _) in study.setups.items():
                for method in methods:
                    runs = [trained(study, setup, method, seed, data) for seed in study.seeds]
                    found.setdefault(setup, {})[method] = runs
                    print(setup, method, [round(one, 3) for one in errors(runs, "unseen")], flush=True)
    if options.out:
        write_json(options.out, {"command": f"python -m benchmarks.{study.name} --out FILE", "setups": found})
    print(table(study, found), differences(study, found), sep="\n\n")
